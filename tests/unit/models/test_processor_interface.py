"""Layer: one process. The native processors have the interface of transformers' processors."""

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from family_directories import character_tokenizer
from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.errors import DataError, ShapeError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.models.open_flamingo import OpenFlamingoProcessor
from tiny_models.mplug_owl3 import tiny_tokenizer

MAKERS: dict[str, Callable[[], Any]] = {
    "mplug_owl3": lambda: MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer()),
    "open_flamingo": lambda: OpenFlamingoProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        character_tokenizer("<|endofchunk|>", "<image>", bos="<s>", eos="</s>"),
    ),
}
PIXELS = {"mplug_owl3": "pixel_values", "open_flamingo": "vision_x"}
QUESTION = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
SAYS = {"role": "assistant", "content": "A dot."}
TEXTS = {
    "mplug_owl3": (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|image|>What is it?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|><|endoftext|>",
    ),
    "open_flamingo": ("<image>Question:What is it? Short answer:", "<|endofchunk|>"),
}


def picture(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def shown(medium: Any, key: str = "image") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", key: medium}, {"type": "text", "text": "What is it?"}]}


@pytest.fixture(params=MAKERS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def processor(family: str) -> Any:
    return MAKERS[family]()


class TestTemplates:
    def test_conversations_have_the_published_form(self, family: str, processor: Any) -> None:
        opened, end = TEXTS[family]
        assert processor.apply_chat_template([QUESTION], add_generation_prompt=True) == opened
        assert processor.apply_chat_template([QUESTION, SAYS]) == f"{opened}A dot.{end}"
        several = processor.apply_chat_template([[QUESTION, SAYS], [QUESTION]], add_generation_prompt=False)
        assert several == [processor.apply_chat_template([QUESTION, SAYS]), processor.apply_chat_template([QUESTION])]
        as_parts = {"role": "assistant", "content": [{"type": "text", "text": "A dot."}]}
        assert processor.apply_chat_template([QUESTION, as_parts]) == several[0]
        assert processor.apply_chat_template([QUESTION, SAYS], continue_final_message=True) == f"{opened}A dot."

    def test_tokenizer_has_the_chat_template(self, processor: Any) -> None:
        assert processor.tokenizer.chat_template == processor.chat_template
        chat = [{"role": "user", "content": "Hi"}, SAYS]
        assert processor.tokenizer.apply_chat_template(chat, tokenize=False) == processor.apply_chat_template(chat)

    def test_other_templates_may_use_tools_documents_and_variables(self, processor: Any) -> None:
        template = "{{ tools[0].name }} {{ documents[0].text }} {{ tone }} {{ messages[0].content }}"
        given: dict[str, Any] = {"tools": [{"name": "t"}], "documents": [{"text": "d"}], "tone": "dry"}
        chat = [{"role": "anyone", "content": "hi"}]
        assert processor.apply_chat_template(chat, chat_template=template, **given) == "t d dry hi"
        for name, value in given.items():
            with pytest.raises(DataError, match=f"unknown arguments: {name}: neither .* nor its chat template uses"):
                processor.apply_chat_template([QUESTION], **{name: value})

    @pytest.mark.parametrize(
        ("chat", "given", "message"),
        [
            ([], {}, r"the conversation is \[\]; pass a list of messages"),
            ([[QUESTION], "hi"], {}, "a conversation is 'hi'; expected a list of messages"),
            ([{"role": "tool", "content": "x"}], {}, "message 0 has the role 'tool'"),
            ([{"role": "user", "content": [{"type": "audio"}]}], {}, "message 0 .user. holds .*audio"),
            ([{"role": "assistant", "content": [{"type": "image"}]}], {}, "only a user message shows media"),
            ([SAYS], {"continue_final_message": True, "add_generation_prompt": True}, "leaves the last answer open"),
            ([SAYS], {"chat_template": "x", "return_assistant_tokens_mask": True}, "no {% generation %} block"),
            ([QUESTION], {"tokenize": True, "return_tensors": "tf"}, "(return_tensors is 'tf'|have|has)"),
        ],
    )
    def test_bad_conversations_are_refused(self, processor: Any, chat: Any, given: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            processor.apply_chat_template(chat, **given)

    def test_template_is_saved_and_loaded(self, processor: Any, family: str, tmp_path: Path) -> None:
        processor.save_pretrained(tmp_path / "one")
        found = AutoProcessor.from_pretrained(tmp_path / "one")
        assert type(found) is type(processor) and found.chat_template == processor.chat_template
        assert AutoTokenizer.from_pretrained(tmp_path / "one").chat_template == processor.chat_template
        assert found.to_dict() == processor.to_dict()
        for template in ("{{ messages[0].content }}!", {"default": "{{ messages[0].content }}", "other": "other"}):
            found.chat_template = template
            found.save_pretrained(tmp_path / "two")
            again = type(processor).from_pretrained(tmp_path / "two")
            assert again.chat_template == again.tokenizer.chat_template == template
        assert again.apply_chat_template([SAYS]) == "A dot."
        assert again.apply_chat_template([SAYS], chat_template="other") == "other"
        assert type(processor).from_pretrained(tmp_path / "two", chat_template="mine").chat_template == "mine"
        (tmp_path / "two" / "additional_chat_templates").rename(tmp_path / "away")
        again.chat_template = {"first": "x"}
        with pytest.raises(DataError, match="no default chat template; pass chat_template, one of first"):
            again.apply_chat_template([SAYS])

    def test_template_of_the_language_model_is_not_used(self, processor: Any, family: str, tmp_path: Path) -> None:
        """Published tokenizers have one, and directories saved before processors had templates have it as a file."""
        processor.save_pretrained(tmp_path)
        config = tmp_path / "processor_config.json"
        config.write_text(config.read_text().replace('"has_chat_template": true', '"has_chat_template": false'))
        (tmp_path / "chat_template.jinja").write_text("of the language model")
        found = type(processor).from_pretrained(tmp_path)
        assert found.chat_template == found.tokenizer.chat_template == MAKERS[family]().chat_template


class TestTokens:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_mask_of_answers_has_their_tokens(self, family: str, processor: Any, side: str) -> None:
        chats = [[shown(picture()), SAYS, {"role": "user", "content": "Sure?"}, SAYS], [shown(picture(1)), SAYS]]
        found = processor.apply_chat_template(
            chats, tokenize=True, return_assistant_tokens_mask=True, return_labels=True, padding_side=side
        )
        ids, masks = found[processor.ids_name], found["assistant_masks"].bool()
        for row, mask, answers in zip(ids, masks, (2, 1), strict=True):
            assert processor.decode(row[mask]).replace(" ", "") == f"Adot.{TEXTS[family][1]}" * answers
        assert torch.equal(found["labels"], ids.masked_fill(~masks, -100))
        assert bool(found["attention_mask"][1, 0]) is (side == "right")

    def test_tokens_equal_those_of_the_formatted_text(self, family: str, processor: Any) -> None:
        chat = [shown(picture()), SAYS]
        found = processor.apply_chat_template(chat, tokenize=True)
        text = processor.apply_chat_template(chat)
        for images in (picture(), [picture()], [[picture()]]):
            expected = processor(text=text, images=images)
            assert found.keys() == expected.keys() == set(processor.model_input_names)
            assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert torch.equal(
            processor.apply_chat_template(chat, tokenize=True, return_dict=False), found[processor.ids_name]
        )

    def test_padding_truncation_and_tensors_follow_transformers(self, processor: Any) -> None:
        ids, texts = processor.ids_name, ["some words", "more"]
        padded = processor(text=texts, padding="max_length", max_length=30, padding_side="left")
        assert padded[ids].shape == (2, 30) and padded["attention_mask"][0, 0] == 0
        assert processor(text=texts, text_kwargs={"pad_to_multiple_of": 8})[ids].shape[1] % 8 == 0
        assert processor(text=texts, truncation=True, max_length=3)[ids].shape == (2, 3)
        assert isinstance(processor(text=texts, return_tensors="np")[ids], np.ndarray)
        lists = processor(text="more", return_tensors=None)
        assert lists[ids] == processor(text="more")[ids].tolist()
        ragged = processor(text=texts, return_tensors=None, padding=False)[ids]
        assert ragged == [processor(text=text)[ids][0].tolist() for text in texts]
        with pytest.raises(DataError, match="padding_side was passed in text_kwargs and outside of it"):
            processor(text=texts, padding_side="left", text_kwargs={"padding_side": "right"})
        with pytest.raises(DataError, match="unknown arguments: colour"):
            processor(text=texts, images_kwargs={"colour": 1})
        with pytest.raises(DataError, match="does not support the arguments return_mm_token_type_ids"):
            processor(text=texts, return_mm_token_type_ids=True)

    @pytest.mark.parametrize("text", [None, [], [3]], ids=repr)
    def test_calls_without_texts_are_refused(self, processor: Any, text: Any) -> None:
        with pytest.raises(DataError, match=re.escape(f"text is {text}; pass a text")):
            processor(text=text)

    def test_texts_may_be_any_iterable(self, processor: Any) -> None:
        texts, ids = ["a b", "c"], processor.ids_name
        for given in (tuple(texts), np.array(texts), iter(texts)):
            assert torch.equal(processor(text=given)[ids], processor(text=texts)[ids])

    def test_truncation_cuts_no_images(self, family: str, processor: Any) -> None:
        text = TEXTS[family][0]
        with pytest.raises(DataError, match="(cuts off .* placeholders of frames|after truncation)"):
            processor(text="words before " + text, images=[picture()], truncation=True, max_length=10)

    def test_decoding_is_the_tokenizers(self, processor: Any) -> None:
        assert processor.batch_decode([[5, 6], [7, 8]]) == processor.tokenizer.batch_decode([[5, 6], [7, 8]])


class TestMedia:
    def test_all_forms_of_an_image_are_equivalent(self, family: str, processor: Any, tmp_path: Path) -> None:
        array, path = picture(), str(tmp_path / "a.png")
        Image.fromarray(array).save(path)
        forms = [
            shown(array),
            shown(torch.from_numpy(array)),
            shown(Image.open(path)),
            shown(path, "path"),
            shown(Path(path), "path"),
            shown(path, "url"),
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": path}}, QUESTION["content"][1]]},
            {"role": "user", "content": [{"type": "image", "image": array, "text": None}, QUESTION["content"][1]]},
        ]
        found = [processor.apply_chat_template([form], tokenize=True) for form in forms]
        for other in found[1:]:
            assert all(torch.equal(other[name], x) for name, x in found[0].items())
        for images in ([path], Path(path), torch.from_numpy(array)[None]):
            assert torch.equal(
                processor(text=TEXTS[family][0], images=images)[PIXELS[family]],
                processor(text=TEXTS[family][0], images=array)[PIXELS[family]],
            )

    def test_one_tensor_may_have_the_images_of_several_texts(self) -> None:
        processor, text = MAKERS["open_flamingo"](), TEXTS["open_flamingo"][0]
        images = torch.stack([torch.from_numpy(picture(seed)) for seed in (0, 1)])
        expected = processor(text=[text, text], images=[[picture(0)], [picture(1)]])["vision_x"]
        for given in (images, images[:, None]):
            assert torch.equal(processor(text=[text, text], images=given)["vision_x"], expected)

    def test_samples_may_have_no_images(self, family: str, processor: Any) -> None:
        alone = processor(text="words")
        assert torch.equal(processor(text=["words"], images=[[]])[processor.ids_name], alone[processor.ids_name])
        chats = [[{"role": "user", "content": "Hi"}], [shown(picture())]]
        mixed = processor.apply_chat_template(chats, tokenize=True)
        assert len(mixed[processor.ids_name]) == 2 and PIXELS[family] in mixed
        one = processor.apply_chat_template(chats[1], tokenize=True)[PIXELS[family]]
        assert torch.equal(mixed[PIXELS[family]][-len(one) :], one)

    def test_images_of_each_text_are_counted(self, family: str, processor: Any) -> None:
        text, mark = TEXTS[family][0], processor.image_token.replace("|", r"\|")
        for images in ([[picture()], []], [[picture(), picture()], []]):
            with pytest.raises(DataError, match=rf"the texts have \[1, 1\] {mark}, and \[[12], 0\] \w+ were passed"):
                processor(text=[text, text], images=images)

    def test_video_file_is_read_as_by_the_commands(self, tmp_path: Path) -> None:
        processor = MAKERS["mplug_owl3"]()
        path = make_needle_videos(tmp_path, 1, frames=(20, 20), rate=10)[0].path
        chat = [{"role": "user", "content": [{"type": "video", "path": str(path)}]}]
        for given, frames in (({}, 2), ({"fps": 5}, 10), ({"num_frames": 3}, 3)):
            found = processor.apply_chat_template(chat, tokenize=True, processor_kwargs=given)
            assert len(found["pixel_values"]) == (found["media_offset"] >= 0).sum() == frames
        assert len(processor(text="<|video|>", videos=Path(path))["pixel_values"]) == 2
        with pytest.raises(DataError, match="fps: 1 of the videos are frames already"):
            processor(text="<|video|>", videos=[[picture(), picture()]], fps=2)

    def test_options_of_images(self) -> None:
        owl, flamingo = (MAKERS[name]() for name in ("mplug_owl3", "open_flamingo"))
        text = TEXTS["mplug_owl3"][0]
        whole = owl(text=text, images=[picture()], images_kwargs={"cut_enable": False})
        assert len(whole["pixel_values"]) == 1
        plain = flamingo(text=TEXTS["open_flamingo"][0], images=[picture()], images_kwargs={"do_normalize": False})
        assert plain["vision_x"].min() >= 0


class TestImageOptions:
    """The options of transformers' image processors, by mPLUG-Owl3's; OpenFlamingo has CLIP's of transformers."""

    images = MPlugOwl3ImageProcessor(image_size=28)

    def test_each_step_can_be_left_out_and_changed(self) -> None:
        small = picture()[:28, :28]
        levels = torch.from_numpy(small).permute(2, 0, 1)[None].float()
        for options, expected in (
            ({}, (levels / 255 - 0.5) / 0.5),
            ({"do_normalize": False}, levels / 255),
            ({"do_normalize": False, "do_rescale": False}, levels),
            ({"do_rescale": False, "image_mean": 1.0, "image_std": 2.0}, (levels - 1) / 2),
            ({"do_normalize": False, "rescale_factor": 1 / 127.5}, levels / 127.5),
            ({"image_mean": [0.1, 0.2, 0.3], "image_std": (1.0, 1.0, 1.0)},
             levels / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)),
        ):  # fmt: skip
            found = self.images(small, **options)["pixel_values"]
            torch.testing.assert_close(found, expected)
            assert torch.equal(found, MPlugOwl3ImageProcessor(image_size=28, **options)(small)["pixel_values"])
            halves = self.images(torch.from_numpy(small) / 255, **options)["pixel_values"]
            if options.get("do_rescale", True):
                torch.testing.assert_close(halves, expected)
        plain = self.images(torch.from_numpy(small) / 255, do_rescale=False, do_normalize=False)["pixel_values"]
        torch.testing.assert_close(plain, levels / 255)

    def test_size_is_that_of_a_call(self) -> None:
        assert self.images(picture(), size=56)["pixel_values"].shape == (1, 3, 56, 56)
        assert self.images(picture(), image_size=56)["pixel_values"].shape == (1, 3, 56, 56)
        assert self.images(picture(), size={"height": 28, "width": 14})["pixel_values"].shape == (1, 3, 28, 14)
        assert self.images(picture(), do_resize=False)["pixel_values"].shape == (1, 3, 40, 50)
        with pytest.raises(DataError, match=r"frames have the sizes \[\(28, 28\), \(40, 50\)\]; pass frames of one"):
            self.images([picture(), picture()[:28, :28]], do_resize=False)
        assert MPlugOwl3ImageProcessor(size={"height": 56, "width": 56}).image_size == 56

    def test_pictures_may_have_other_forms(self, tmp_path: Path) -> None:
        expected = self.images(picture())["pixel_values"]
        Image.fromarray(picture()).save(tmp_path / "a.png")
        assert torch.equal(self.images(str(tmp_path / "a.png"))["pixel_values"], expected)
        array = self.images(picture(), return_tensors="np")["pixel_values"]
        assert isinstance(array, np.ndarray) and np.array_equal(array, expected.numpy())
        narrow = picture()[:, :3].copy()  # (40, 3, 3)
        turned = torch.from_numpy(narrow).permute(2, 0, 1)
        assert torch.equal(
            self.images(turned, input_data_format="channels_first")["pixel_values"],
            self.images(narrow, input_data_format="channels_last", device="cpu")["pixel_values"],
        )
        grey = Image.fromarray(picture()).convert("L")
        assert self.images(grey)["pixel_values"].shape == (1, 3, 28, 28)
        with pytest.raises(ShapeError, match=r"frame 0 is \(40, 50\); expected an image"):
            self.images(grey, do_convert_rgb=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"do_center_crop": True, "crop_size": 14}, "does not support do_center_crop, crop_size: whole frames"),
            ({"do_pad": True}, "does not support do_pad"),
            ({"resample": 2}, "resample is 2; frames are resized bicubically, which is 3"),
            ({"data_format": "channels_last"}, "data_format is 'channels_last'; the model takes 'channels_first'"),
            ({"size": {"shortest_edge": 28}}, "size is .*shortest_edge.*; expected a number, or height and width"),
        ],
    )
    def test_options_that_frames_cannot_have_are_refused(self, options: dict[str, Any], message: str) -> None:
        for used in (
            lambda: self.images(picture(), **options),
            lambda: MPlugOwl3ImageProcessor(**options),
            lambda: MAKERS["mplug_owl3"]()(text="<|image|>", images=[picture()], images_kwargs=options),
        ):
            with pytest.raises(DataError, match=message):
                used()
        with pytest.raises(DataError, match="the vision tower takes squares"):
            MPlugOwl3ImageProcessor(size=(28, 14))

    def test_processor_passes_options_on(self, tmp_path: Path) -> None:
        owl = MAKERS["mplug_owl3"]()
        given: dict[str, Any] = {"text": "<|image|><|video|>", "images": [picture()], "videos": [[picture(1)] * 2]}
        for options in ({"do_normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}, {"size": 56}):
            other = MPlugOwl3Processor(MPlugOwl3ImageProcessor(**{"image_size": 28} | options), owl.tokenizer)
            expected = other(**given)
            for found in (owl(**given, **options), owl(**given, images_kwargs=options, videos_kwargs=options)):
                assert all(torch.equal(found[name], x) for name, x in expected.items())
        stills = owl(**given, images_kwargs={"do_normalize": False})["pixel_values"]
        assert stills[:-2].min() >= 0 and stills[-2:].min() < 0
        with pytest.raises(DataError, match=r"give frames of the sizes \[\(28, 28\), \(56, 56\)\]"):
            owl(**given, images_kwargs={"size": 56})
        with pytest.raises(DataError, match="do_resize is False and cut_enable is True, which resizes images"):
            owl(**given, do_resize=False)
        owl.save_pretrained(tmp_path)
        assert not MPlugOwl3Processor.from_pretrained(tmp_path, do_normalize=False).image_processor.do_normalize
        assert MPlugOwl3Processor.from_pretrained(tmp_path).image_processor.to_dict() == owl.image_processor.to_dict()


def test_processors_render_chats_in_several_threads() -> None:
    interval = sys.getswitchinterval()
    processors = [MAKERS["mplug_owl3"]() for _ in range(4)]
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A dot."}]

    def targets(number: int) -> int:
        encoded = processors[number % 4].encode([chat], return_labels=True)
        return int((encoded["labels"] != -100).sum())

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(targets, range(200))) == {len("A dot.") + 2}
    finally:
        sys.setswitchinterval(interval)
