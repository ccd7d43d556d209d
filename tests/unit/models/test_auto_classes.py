"""Layer: one process. transformers' Auto classes on saved native models, in new processes and in this one."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from family_directories import MAKERS
from launch import PYTHON
from mllm_seqpar.models.auto_classes import CODE_MODULE, register
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration
from tiny_models.mplug_owl3 import tiny_config

LOAD = """
import os, sys
import torch._dynamo, torch.distributed.tensor, transformers  # once for both orders
options = {}
ORDERS = {
    "the package first": "import mllm_seqpar; from transformers import AutoConfig, AutoModel, AutoProcessor",
    "remote code": "from transformers import AutoConfig, AutoModel, AutoProcessor; options['trust_remote_code'] = True",
}
for order, imports in ORDERS.items():
    if not os.fork():
        break
    if os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(order)
else:
    sys.exit()
assert not any(name.startswith("mllm_seqpar") for name in sys.modules)
exec(imports)
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
absent = [name for name in sys.modules if name.startswith("mllm_seqpar") and name.endswith(("modeling", "processing"))]
assert not absent, absent  # importing loads no model
for folder in sys.argv[1:]:
    found = [auto.from_pretrained(folder, **options) for auto in (AutoConfig, AutoProcessor)]
    found += [auto.from_pretrained(folder, **options) for auto in (AutoModelForImageTextToText, AutoModel)]
    assert AutoTokenizer.from_pretrained(folder, **options).chat_template == found[1].chat_template
    if type(AutoImageProcessor) is type:  # transformers 5.17 has it with torchvision only
        images = AutoImageProcessor.from_pretrained(folder, **options)
        assert type(images).__name__ == type(found[1].image_processor).__name__
        assert images.to_dict() == found[1].image_processor.to_dict()
    print(*(type(x).__name__ for x in found))
"""


@pytest.fixture(scope="module")
def folders(inference_files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved directories by the beginning of their classes' names."""
    found = {"MPlugOwl3": inference_files / "gated"}
    if "open_flamingo" in MAKERS:
        found["OpenFlamingo"] = tmp_path_factory.mktemp("saved") / "flamingo"
        MAKERS["open_flamingo"](found["OpenFlamingo"])
    return found


@pytest.mark.slow
def test_new_process_loads_a_directory_by_auto_classes_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    command = [*PYTHON, "-c", LOAD, *map(str, folders.values())]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = {"MPlugOwl3": "MPlugOwl3ForConditionalGeneration", "OpenFlamingo": "OpenFlamingo"}
    expected = [f"{name}Config {name}Processor {model[name]} {model[name]}" for name in folders]
    assert done.stdout.splitlines() == [*expected, *expected]


def test_directory_names_its_remote_code_also_where_it_was_published_with_other_code(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = tiny_config()
    config.auto_map = {"AutoConfig": "configuration_mplugowl3.mPLUGOwl3Config"}
    MPlugOwl3ForConditionalGeneration(config).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(folders["MPlugOwl3"]).save_pretrained(tmp_path)
    expected = {"AutoConfig": "MPlugOwl3Config", "AutoProcessor": "MPlugOwl3Processor"}
    expected["AutoModelForImageTextToText"] = "MPlugOwl3ForConditionalGeneration"
    expected["AutoImageProcessor"] = "MPlugOwl3ImageProcessor"
    for file in ("config.json", "processor_config.json", "preprocessor_config.json"):
        named = json.loads((tmp_path / file).read_text())["auto_map"]
        assert named == named | {auto: f"{CODE_MODULE}.{name}" for auto, name in expected.items()}
    assert [path.name for path in tmp_path.glob("*.py")] == [f"{CODE_MODULE}.py"]
    # Without trust_remote_code, the installed package is used and nothing is asked.
    assert type(AutoConfig.from_pretrained(tmp_path)) is MPlugOwl3Config


def test_loading_as_remote_code_does_not_copy_the_source_into_saved_directories(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folders["MPlugOwl3"], trust_remote_code=True)
    for kind in (type(model), type(model.config)):
        kind.register_for_auto_class()
        assert kind._auto_class is None
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == [f"{CODE_MODULE}.py"]


def test_later_registrations_of_users_are_kept(folders: dict[str, Path]) -> None:
    class Derived(MPlugOwl3ForConditionalGeneration):
        pass

    AutoModelForCausalLM.register(MPlugOwl3Config, Derived, exist_ok=True)
    try:
        register()  # as after the import of another module of Auto classes, or of another native model
        assert type(AutoModelForCausalLM.from_pretrained(folders["MPlugOwl3"])) is Derived
    finally:
        AutoModelForCausalLM.register(MPlugOwl3Config, MPlugOwl3ForConditionalGeneration, exist_ok=True)
