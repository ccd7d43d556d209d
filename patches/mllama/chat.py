"""Llama 3.2 Vision: chats by the processor's own template, pictures of several tiles, and its mask of tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.data.chat_family import (
    VIDEO_MARK,
    ChatFamily,
    ChatText,
    Messages,
    StoredFrames,
    as_pictures,
    check_pictures,
    padded_slots,
    pictures_of,
    with_pictures,
)
from mllm_seqpar.data.chat_tokens import answer_spans, tokenise
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.errors import DataError
from mllm_seqpar.sharding import FrameShard

_START, _STOP, _END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class MllamaChats(ChatFamily):
    """`MllamaProcessor` and `MllamaForConditionalGeneration`."""

    marks = ("<|image|>", _START, _STOP, _END, "<|begin_of_text|>", "<|end_of_text|>", VIDEO_MARK)
    frame_names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    model_class = "MllamaForConditionalGeneration"
    feature_weights = (
        *("model.vision_model.", "model.multi_modal_projector."),
        *("vision_model.", "multi_modal_projector."),
    )

    def text(
        self,
        conversations: Sequence[Messages],
        shown: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """With `cross_attention_mask` (B, L, pictures of a sample, tiles), 0 or 1, where anything is shown."""
        chats = [with_pictures(messages, own) for messages, own in zip(conversations, shown, strict=True)]
        texts = [self.write(messages, add_generation_prompt) for messages in chats]
        spans = [answer_spans(messages, self.write) for messages in chats] if labels else None
        bos = self.tokenizer.bos_token
        ids, mask, targets = tokenise(
            self.tokenizer,
            texts,
            spans,
            padding_side=padding_side,
            add_special_tokens=not (bos and all(bos in text for text in texts)),
        )
        counts = pictures_of(shown)
        check_pictures(ids, self.processor.image_token_id, counts, self.processor.image_token)
        tiles = [[self.tiles(size) for source in own for size in _sizes(source)] for own in shown]
        extras = {}
        if any(counts):
            extras["cross_attention_mask"] = tile_mask(ids, self.processor.image_token_id, tiles, self._max_tiles)
        return ChatText(input_ids=ids, attention_mask=mask, labels=targets, slots=padded_slots(counts), extras=extras)

    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        """By the chat template of the directory; without one, as Llama 3 is instructed."""
        from transformers.models.mllama.processing_mllama import build_string_from_input

        image, bos = self.processor.image_token, self.tokenizer.bos_token or ""
        if self.processor.chat_template or self.tokenizer.chat_template:
            template = self.processor.chat_template or self.tokenizer.chat_template
            text = self.processor.apply_chat_template(
                list(messages), chat_template=template, add_generation_prompt=open_answer, tokenize=False
            )
        else:
            if _END not in self.tokenizer.get_vocab():
                raise DataError(
                    f"there is no chat template, and the tokenizer does not know {_END}, so chats cannot be written as "
                    "Llama 3's; put a chat_template.jinja beside the model"
                )
            text = bos + "".join(
                f"{_START}{message['role']}{_STOP}\n\n"
                + "".join(image if part["type"] == "image" else part["text"] for part in message["content"])
                + _END
                for message in messages
            )
            text += f"{_START}assistant{_STOP}\n\n" if open_answer else ""
        return build_string_from_input(text, bos, image)

    def tiles(self, size: tuple[int, int]) -> int:
        """Tiles of a picture of that (height, width)."""
        from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas

        side = self._side
        canvas = get_optimal_tiled_canvas(size[0], size[1], self._max_tiles, side)
        return int(canvas[0] // side) * int(canvas[1] // side)

    @property
    def _max_tiles(self) -> int:
        return self.processor.image_processor.max_image_tiles

    @property
    def _side(self) -> int:
        return int(self.processor.image_processor.size["height"])

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """(n, tiles, 3, S, S), aspect ratio ids (n,) and mask (n, tiles)."""
        if not len(frames):
            return tuple(x[:0] for x in self.blank())
        made = self.processor.image_processor([as_pictures(frames)], return_tensors="pt")
        return tuple(made[name][0] for name in self.frame_names)

    def blank(self) -> tuple[Tensor, ...]:
        """A picture of aspect ratio 0, which is none, and of one tile."""
        tiles, side = self._max_tiles, self._side
        valid = torch.zeros(1, tiles, dtype=torch.long)
        valid[:, 0] = 1
        return torch.zeros(1, tiles, 3, side, side), torch.zeros(1, dtype=torch.long), valid

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """The projected tower's, all tiles of a picture after one another."""
        given = {name: x[None] for name, x in zip(self.frame_names, frames, strict=True)}
        states = model.model.vision_model(**given).last_hidden_state
        return model.model.multi_modal_projector(states)[0].flatten(1, 2)

    def shows_features(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """As `cross_attention_states` of whole pictures."""
        return {"cross_attention_states": features.unflatten(1, (self._max_tiles, -1)), "visual_shard": shard}

    def facts_of_frames(self, source: FrameSource) -> dict[str, Any]:
        """Their size, by which a prompt knows their tiles."""
        sizes = set(_sizes(source))
        if len(sizes) != 1:
            raise DataError(f"pictures of several sizes, {sorted(sizes)}, cannot be kept as the features of one video")
        return {"frame_size": list(sizes.pop())}

    def stored_frames(self, count: int, facts: Mapping[str, Any]) -> FrameSource:
        """With their size."""
        size = facts.get("frame_size")
        return StoredFrames(count, None if size is None else (int(size[0]), int(size[1])))


def tile_mask(ids: Tensor, image: int, tiles: Sequence[Sequence[int]], max_tiles: int) -> Tensor:
    """(B, L, pictures, tiles), 1 where a row sees a tile: those of a picture from its token to the next text's.

    Args:
        ids: (B, L).
        image: the pictures' token.
        tiles: of each picture of each sample.
        max_tiles: that any has.
    """
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    length = ids.shape[1]
    seen = torch.zeros(len(tiles), length, max(map(len, tiles)), max_tiles, dtype=torch.uint8)
    for sample, (row, own) in enumerate(zip(ids.tolist(), tiles, strict=True)):
        spans = get_cross_attention_token_mask(row, image)
        for picture, ((start, stop), count) in enumerate(zip(spans, own, strict=True)):
            seen[sample, start : length if stop == -1 else stop, picture, :count] = 1
    return seen


def _sizes(source: Any) -> list[tuple[int, int]]:
    if not hasattr(source, "sizes"):
        raise DataError(f"{type(source).__name__} has no method sizes, by which the tiles of pictures are known")
    return source.sizes()
