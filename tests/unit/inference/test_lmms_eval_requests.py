"""Layer: one process. Requests of lmms-eval are answered, or refused if unsupported; without lmms-eval itself."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from family_directories import MAKERS, family_folder
from lmms_eval_names import lmms_eval_model
from mllm_seqpar import patch_model
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.data import VideoSource
from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.inference import Conversation, Sampling, answer, encode, engine, load_for_inference
from mllm_seqpar.inference.choices import continuation
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.videos.frame_choice import FrameChoice


@pytest.fixture
def model() -> Iterator[Any]:
    with lmms_eval_model() as module:
        yield module


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 3},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 4},
        {"top_k": 20, "temperature": 0.7, "do_sample": True},
    ],
)
def test_settings_of_generation_that_would_be_ignored_are_refused(model: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        model._generation(given)


def test_settings_without_effect_are_accepted(model: Any) -> None:
    neutral = {"num_beams": 1, "top_k": 50, "top_p": None, "temperature": 0, "do_sample": False, "until": "\n\n"}
    assert model._generation(neutral) == {"sampling": Sampling(max_new_tokens=128), "stop": ("\n\n",)}
    sampled = model._generation({"temperature": 0.7, "top_p": 0.9, "top_k": 0, "max_new_tokens": 5})
    assert sampled["sampling"] == Sampling(max_new_tokens=5, temperature=0.7, top_p=0.9)


@pytest.mark.parametrize("name", ["model", "top_p", "colour"])
def test_options_of_model_args_that_are_stated_elsewhere_or_unknown_are_refused(model: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--model_args: '{name}' is unknown; choose from .*dtype"):
        model._options("DIR", {name: "x"})


def test_likelihood_of_an_empty_text_is_refused(model: Any) -> None:
    with pytest.raises(DataError, match="empty text"):
        model._answer(model._Request(messages=[], sampling=Sampling(), target=""), None, None)


@pytest.mark.parametrize("name", ["gated", "moss_vl"])
def test_requests_are_answered_and_scored_and_padding_is_not(
    model: Any, inference_files: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(model, "GenerationResult", SimpleNamespace)
    clip = str(inference_files / "clip.mp4")
    directory = str((family_folder() if name in MAKERS else inference_files) / name)
    asked = model.SimpleSeqParModel(directory, device="cpu", num_frames=3)
    asked.task_dict = {"task": {"test": [{}]}}
    place = (lambda document: [clip], 0, "task", "test")
    real = SimpleNamespace(args=("What is it?", {"max_new_tokens": 4}, *place), metadata=None)
    padding = SimpleNamespace(args=None, metadata={"__padding_only__": True})
    first, none, again = asked.generate_until([real, padding, real])
    assert first == again and none == ""
    processor = load_processor(directory)
    patched = patch_model(load_for_inference(directory, "auto", torch.device("cpu")))
    video = encode(patched, processor, VideoSource.open(clip, num_frames=3))
    expected = answer(patched, processor, "What is it?", video, Sampling(max_new_tokens=4))
    assert first == expected.text

    conversation = Conversation(patched, processor, encoded=video)
    prompt = conversation.question("What is it?")
    for target in ("Z", "It is."):
        request = SimpleNamespace(args=("What is it?", target, *place), metadata=None)
        (found,) = asked.loglikelihood([request])
        tokens = continuation(processor.tokenizer, prompt.input_ids[0].tolist(), target)
        (score,) = conversation.log_likelihoods(prompt, [tokens])
        assert found.text == (pytest.approx(-score.log_likelihood / len(tokens)), score.is_greedy)
    tokens = [tokens[0], processor.tokenizer.eos_token_id, *tokens[:2]]
    whole, part = conversation.log_likelihoods(prompt, [tokens, tokens[:2]])  # an end token does not end it
    assert whole.log_likelihood < part.log_likelihood

    broken = SimpleNamespace(args=("?", {}, lambda document: ["missing.mp4"], *place[1:]), metadata=None)
    with pytest.raises(VideoError, match=r"missing\.mp4"):
        asked.generate_until([broken])


def test_features_of_a_video_are_freed_before_the_next_is_encoded(
    model: Any, inference_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[weakref.ref[Any]] = []

    class Watched(Conversation):
        def encode(self, *args: Any, **kwargs: Any) -> None:
            if self.encoded is None:
                assert not any(one() is not None for one in begun), "an earlier video is still in memory"
                begun.append(weakref.ref(self))
            super().encode(*args, **kwargs)

    monkeypatch.setattr(engine, "Conversation", Watched)
    asked = model.SimpleSeqParModel(str(inference_files / "gated"), device="cpu", num_frames=3)
    asked.task_dict = {"task": {"test": ["clip.mp4", "twin.mp4"]}}

    def videos(document: str) -> list[str]:
        return [str(inference_files / document)]

    requests = [
        SimpleNamespace(args=("What is it?", {"max_new_tokens": 2}, videos, number, "task", "test"), metadata=None)
        for number in (0, 1)
    ]
    gc.disable()
    try:
        asked.generate_until(requests)
    finally:
        gc.enable()
    assert len(begun) == 2


def test_messages_of_a_task_show_clips_of_videos(model: Any, tmp_path: Path) -> None:
    content = [
        {"type": "video", "url": "a.mp4", "start_time": 1.5, "end_time": None},
        {"type": "image", "url": str(tmp_path / "b.png")},
        {"type": "text", "text": "What?"},
    ]
    asked = object.__new__(model.ChatSeqParModel)
    asked.options = SimpleNamespace(frame_choice=lambda: FrameChoice(num_frames=4))
    asked.task_dict, asked._system = {"task": {"test": [[{"role": "user", "content": content}]]}}, "Be brief."
    request = asked._generation_request(SimpleNamespace(args=(None, lambda messages: messages, {}, 0, "task", "test")))
    video = Clip("video", "a.mp4", FrameChoice(num_frames=4, start=1.5))
    assert request.media[0] == video and request.media[1].kind == "image"
    assert [message["role"] for message in request.messages] == ["system", "user"]
    with pytest.raises(DataError, match="holds {'type': 'audio'.*, which is not a part"):
        asked._generation_request(
            SimpleNamespace(
                args=(None, lambda _: [{"role": "user", "content": [{"type": "audio"}]}], {}, 0, "task", "test")
            )
        )
