"""Layer: one process, loopback ranks. The family that the guide builds on one page equals the unpatched model.

It is a family of another package: registered, not in the index.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import IdeficsConfig, PreTrainedConfig

from family_directories import make_idefics
from family_harness import build, check_exact, check_tokens, model_of, traces
from mllm_seqpar import patch_model, register_adapter
from mllm_seqpar.chats.clip import ImageListSource
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.data import chat_family
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.inference.conversation import Conversation
from mllm_seqpar.integrations.transformers.family import text_arguments
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.patching import registry
from mllm_seqpar.planner.model_sizes import read_model
from tiny_models.idefics import Case

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "add_a_family.md"
OPTIONS: dict[str, dict[str, Any]] = {"lv-xattn": {}, "ring": {"strategy": "ring", "mlp_chunk_size": 3}}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the class that the page defines, registered before the family of this package."""
    (code,) = re.findall(r"```python\n(import functools\n.*?)```\n", GUIDE.read_text(), re.DOTALL)
    module = ModuleType("family_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_registered", {})
    exec(compile(code, str(GUIDE), "exec"), vars(module))
    register_adapter(module.MyFamily)
    return module.MyFamily


@pytest.mark.parametrize("options", OPTIONS)
def test_family_of_the_guide_equals_unpatched(family: Any, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(family, "install_more", _counting(family.install_more, installed))
    case = Case(frames=(2, 3), mask="before", length=13, options=OPTIONS[options])
    for size in (1, 2, 3):
        check_exact("idefics", size, case)
    assert len(installed) == 6, "another family patched the model"


@pytest.mark.parametrize("size", [1, 2])
def test_family_of_the_guide_without_norms_of_heads_equals_unpatched(family: Any, size: int) -> None:
    case = Case(frames=(2, 3), mask="before", model={"qk_layer_norms": False})
    check_exact("idefics", size, case)


def test_family_of_the_guide_refuses_dropout_of_its_attention_to_frames(family: Any) -> None:
    case = Case(train=True)
    model, inputs = build("idefics", case)
    for block in model.model.gated_cross_attn_layers:
        block.cross_attn.dropout = 0.1
    patched = patch_model(model)
    with pytest.raises(ConfigError, match="attention_dropout=0.1: dropout on attention weights is not supported"):
        patched(**inputs)
    assert torch.isfinite(patched.eval()(**inputs).loss)


def test_family_of_the_guide_refuses_a_resampler(family: Any) -> None:
    with pytest.raises(ConfigError, match="use_resampler=True: this family has no resampler"):
        patch_model(model_of("idefics", Case(model={"use_resampler": True})))


def test_family_of_the_guide_generates_the_tokens_of_unpatched(family: Any) -> None:
    case = Case(frames=(2, 1), mask="before", labels=None)
    for given in ({}, {"num_beams": 2}):
        check_tokens("idefics", 2, case, given)


class Beside:
    """A decoder whose first layer has no attention to text."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.layers = decoder, [nn.Identity(), *decoder.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(self, **kwargs: Any) -> Any:
        return self.decoder(**kwargs)


def test_first_layer_of_a_decoder_may_attend_to_no_text(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = sys.modules[family.__module__].run_layers
    monkeypatch.setattr(family, "decoder", property(lambda self: Beside(self.model.model)))
    monkeypatch.setattr(family, "install_more", lambda self, patch: patch.set_forward(self.model.model, forward))
    check_exact("idefics", 2, Case(frames=(2, 1), padding="left", options={"self_attention": "local"}))


def test_family_without_attention_to_text_is_refused(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("idefics", Case())
    blocks = SimpleNamespace(layers=model.model.gated_cross_attn_layers)
    monkeypatch.setattr(family, "decoder", property(lambda self: blocks))
    before = traces(model)
    with pytest.raises(AdapterError, match="MyFamily: no layer of SimpleNamespace has a self_attn"):
        patch_model(model)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("encode", lambda x: x.flatten(0, 1), r"MyFamily: encode returned features of shape \(\d+, \d+\)"),
        ("unit_index", lambda x: x[:1], r"and unit_index \(1,\); expected"),
    ],
)
def test_features_of_wrong_shape_are_refused(
    family: Any, method: str, wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(family, method)
    monkeypatch.setattr(family, method, lambda *arguments: wrong(original(*arguments)))
    model, inputs = build("idefics", Case(frames=(2, 3)))
    with pytest.raises(ShapeError, match=message):
        patch_model(model)(**inputs)


def test_config_need_not_describe_images_or_caches(family: Any) -> None:
    model = SimpleNamespace(config=PreTrainedConfig(), get_input_embeddings=lambda: nn.Embedding(2, 2), training=False)
    context: Any = SimpleNamespace(comm=SimpleNamespace(size=1), config=SeqParConfig())
    found = family(model, context)
    with pytest.raises(AdapterError, match=r"MyFamily: .* attribute 'vision_config'\); define blank_frame"):
        found.blank_frame()
    found.__dict__ |= {"text_config": model.config, "checkpointed_modules": []}
    model.model = nn.Identity()  # the decoder
    assert not text_arguments(found, {})["use_cache"]
    assert text_arguments(found, {"use_cache": True})["use_cache"]


def test_docstring_of_a_family_may_have_braces(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "forward_doc", "Return {'loss': loss} of {frames}.")
    model = patch_model(model_of("idefics", Case()))
    assert model.forward.__doc__.endswith("Return {'loss': loss} of `pixel_values` or `image_encoder_embeddings`.")


TEMPLATE = """{%- for message in messages %}{{- message['role'] + ':' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""


def test_questions_to_the_family_of_the_guide_are_answered_as_by_unpatched(family: Any, tmp_path: Path) -> None:
    make_idefics(tmp_path)
    processor: Any = load_processor(str(tmp_path))
    processor.chat_template = TEMPLATE
    chat_format = chat_family(processor)
    assert type(chat_format) is family.chat and chat_format.family is family
    video = ImageListSource(list(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)))
    question = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is it?"}]}]
    text = chat_format.text([question], [[video]], add_generation_prompt=True)
    assert text.extras["image_attention_mask"].sum(2)[0].tolist() == [0] * 5 + [1] * (text.input_ids.shape[1] - 5)
    inputs = chat_format.arguments(text) | chat_format.unsharded(video)
    # Not loaded by threads: from_pretrained sets global flags and restores what it found.
    model, *models = (load_model(str(tmp_path)).eval() for _ in range(4))
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=6)[0, text.input_ids.shape[1] :].tolist()

    def answer(comm: Communicator) -> list[int]:
        patched = patch_model(models.pop(), group=comm)
        conversation = Conversation(patched, processor, [video], batch=2)
        return conversation.answer(conversation.prompt(question), Sampling(max_new_tokens=6)).tokens

    assert run_loopback(1, answer) == [tokens]
    assert run_loopback(2, answer) == [tokens] * 2


@pytest.mark.parametrize("norms", [True, False])
def test_planner_takes_the_sizes_of_an_external_family(family: Any, tmp_path: Path, norms: bool) -> None:
    config = IdeficsConfig(qk_layer_norms=norms, use_resampler=False, vision_config={"embed_dim": 96}).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    expected = read_model(tmp_path)
    assert expected == family.sizes["idefics"](config, tmp_path.name), "the page describes what the package does"
    file.write_text(json.dumps(config | {"model_type": "mine"}))
    with pytest.raises(ConfigError, match="model_type 'mine'; known model types: idefics, mllama"):
        read_model(tmp_path)
    family.sizes = {"mine": family.sizes["idefics"]}
    assert read_model(tmp_path) == expected


def test_class_with_instance_methods_is_no_adapter() -> None:
    class Instances:
        name = "instances"

        def matches(self, model: Any) -> bool:
            return False

        check = install = matches

    with pytest.raises(registry.AdapterError, match="class Instances was given where an instance"):
        register_adapter(Instances)  # type: ignore[arg-type]


def _counting(method: Any, calls: list[Any]) -> Any:
    def call(self: Any, patch: Any) -> None:
        calls.append(self)
        method(self, patch)

    return call
