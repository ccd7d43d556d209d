"""Layer: one process. Requests of lmms-eval whose settings are not supported are refused; without lmms-eval itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from lmms_eval_names import lmms_eval_model
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.inference import Sampling


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
        model._Request(messages=[], sampling=Sampling(), target="").answer(None, None)
