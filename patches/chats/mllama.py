"""The chat format of Llama 3.2 Vision: the chat template of the directory, and images cut into tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import (
    VIDEO_MARK,
    DataError,
    FeatureFrames,
    FrameShard,
    FrameSource,
    ImageTokenFamily,
    to_pil_images,
)

_START, _STOP, _END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class MllamaChats(ImageTokenFamily):
    """`MllamaProcessor` and `MllamaForConditionalGeneration`."""

    processors = ("MllamaProcessor",)
    marks = ("<|image|>", _START, _STOP, _END, "<|begin_of_text|>", "<|end_of_text|>", VIDEO_MARK)
    frame_names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    feature_weights: tuple[str, ...] = (
        "model.vision_model.",
        "model.multi_modal_projector.",
        "vision_model.",
        "multi_modal_projector.",
    )

    @property
    def image_token(self) -> str:
        return self.processor.image_token

    @property
    def _max_tiles(self) -> int:
        return self.processor.image_processor.max_image_tiles

    @property
    def _side(self) -> int:
        return int(self.processor.image_processor.size["height"])

    def needs_special_tokens(self, texts: Sequence[str]) -> bool:
        """Return False if the texts already contain the token that begins a text."""
        bos = self.tokenizer.bos_token
        return not (bos and all(bos in text for text in texts))

    def masks(self, ids: Tensor, media: Sequence[Sequence[FrameSource]]) -> dict[str, Tensor]:
        """Return `cross_attention_mask` (B, L, images of a sample, tiles), 0 or 1; nothing without images."""
        tiles = [[self.tiles(size) for source in sources for size in source.sizes()] for sources in media]
        if not any(tiles):
            return {}
        return {"cross_attention_mask": tile_mask(ids, self.processor.image_token_id, tiles, self._max_tiles)}

    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        """Apply the chat template of the directory; without one, write the format of Llama 3's instructed models."""
        from transformers.models.mllama.processing_mllama import build_string_from_input

        image, bos = self.image_token, self.tokenizer.bos_token or ""
        if template := self.processor.chat_template or self.tokenizer.chat_template:
            text = self.processor.apply_chat_template(
                list(messages), chat_template=template, add_generation_prompt=open_answer, tokenize=False
            )
        else:
            if _END not in self.tokenizer.get_vocab():
                raise DataError(
                    f"there is no chat template, and the tokenizer has no token {_END}, so chats cannot be written in "
                    "Llama 3's format; add a chat_template.jinja to the model directory"
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
        """Return the number of tiles of an image of this (height, width)."""
        from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas

        side = self._side
        canvas = get_optimal_tiled_canvas(size[0], size[1], self._max_tiles, side)
        return int(canvas[0] // side) * int(canvas[1] // side)

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return tiles (n, tiles, 3, S, S), aspect ratio ids (n,) and aspect ratio mask (n, tiles)."""
        processed = self.processor.image_processor([to_pil_images(frames)], return_tensors="pt")
        return tuple(processed[name][0] for name in self.frame_names)

    def blank(self) -> tuple[Tensor, ...]:
        """Return an image of one tile with aspect ratio id 0, which stands for no image."""
        tiles, side = self._max_tiles, self._side
        valid = torch.zeros(1, tiles, dtype=torch.long)
        valid[:, 0] = 1
        return torch.zeros(1, tiles, 3, side, side), torch.zeros(1, dtype=torch.long), valid

    def tower_frames(self, pixels: Tensor) -> int:
        return pixels.shape[1]

    def tower_states(self, output: Any) -> Tensor:
        """Return (images, tiles, tokens, width)."""
        return output.last_hidden_state[0]

    def tower_output(self, states: Tensor) -> Any:
        return super().tower_output(states[None])

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"cross_attention_states": features.unflatten(1, (self._max_tiles, -1)), "visual_shard": shard}

    def frame_metadata(self, source: FrameSource) -> dict[str, Any]:
        """Return the times, and the frame size, which determines the number of tiles of each frame."""
        sizes = set(source.sizes())
        if len(sizes) != 1:
            raise DataError(f"frames of several sizes, {sorted(sizes)}, cannot be stored as the features of one video")
        return super().frame_metadata(source) | {"frame_size": list(sizes.pop())}

    def stored_frames(self, count: int, metadata: Mapping[str, Any]) -> FrameSource:
        size = metadata.get("frame_size")
        known = None if size is None else (int(size[0]), int(size[1]))
        return FeatureFrames(count, known, metadata.get("frame_seconds"))


def tile_mask(ids: Tensor, image: int, tiles: Sequence[Sequence[int]], max_tiles: int) -> Tensor:
    """Return (B, L, images, tiles), 1 where a row attends to a tile: from its image's token until the next image.

    Args:
        ids: (B, L).
        image: the id of the image token.
        tiles: the number of tiles of each image of each sample.
        max_tiles: the size of the last dimension.
    """
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    length = ids.shape[1]
    mask = torch.zeros(len(tiles), length, max(map(len, tiles)), max_tiles, dtype=torch.uint8)
    for sample, (row, counts) in enumerate(zip(ids.tolist(), tiles, strict=True)):
        spans = get_cross_attention_token_mask(row, image)
        for number, ((start, stop), count) in enumerate(zip(spans, counts, strict=True)):
            mask[sample, start : length if stop == -1 else stop, number, :count] = 1
    return mask
