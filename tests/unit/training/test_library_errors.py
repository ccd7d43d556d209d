"""Layer: one process. What transformers raises before the training begins is one sentence; what this package raises by
mistake keeps its traceback."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mllm_seqpar.cli.program_exit import library_errors
from mllm_seqpar.errors import ConfigError, TransferError, library_fault
from mllm_seqpar.models.loading import load_config
from mllm_seqpar.training.finetune import fine_tune


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_optimizer_whose_package_is_missing_is_one_sentence(training_files: Path, tmp_path: Path) -> None:
    argv = ["--model", training_files / "model", "--data", training_files / "train.jsonl", "--output_dir", tmp_path]
    with pytest.raises(ConfigError, match="^the training cannot begin: You need to install `bitsandbytes`") as found:
        fine_tune([*map(str, argv), "--use_cpu", "--max_steps", "1", "--optim", "adamw_8bit"])
    assert "\n" not in str(found.value)


def test_only_errors_of_libraries_before_the_work_are_sentences(tmp_path: Path) -> None:
    def of_transformers() -> None:
        AutoTokenizer.from_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="^it cannot begin: .*[a-z]"), library_errors("it cannot begin"):
        of_transformers()
    with pytest.raises((OSError, ValueError)) as found, library_errors("it cannot begin", lambda: True):
        of_transformers()
    assert not isinstance(found.value, ConfigError)
    for error in (KeyError("a mistake"), TransferError("a rank has ended")):
        with pytest.raises(type(error)), library_errors("it cannot begin"):
            raise error


def test_errors_of_this_package_that_a_library_calls_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(str(tmp_path))
    assert library_fault(found.value) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "mplugowl3", "gate": "x"}', "gate is 'x'; expected one of"),
        (
            '{"model_type": "mllama", "architectures": ["VideoMllamaForConditionalGeneration"], "pool_mode": "x"}',
            "pool_mode is 'x'; expected one of",
        ),
    ],
)
def test_error_of_a_native_config_names_the_directory(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=f"^--model {re.escape(str(tmp_path))}: {message}"):
        load_config(str(tmp_path))


def test_last_sentence_of_a_long_message_is_quoted() -> None:
    code = "raise ValueError('It is long. ' * 100 + 'Install\\n the package.')"
    with pytest.raises(ValueError, match="Install") as found:
        exec(compile(code, "trainer.py", "exec"), {"__name__": "transformers.trainer"})
    assert library_fault(found.value) == "Install the package."
