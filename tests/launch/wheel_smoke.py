"""Use an installed wheel: import the package, patch a tiny model, generate, and plan a run.

    python tests/launch/wheel_smoke.py        # from any folder, with the interpreter of a clean environment

It fails if the package was imported from the repository.
"""

import subprocess
import sys
from pathlib import Path

import torch

import mllm_seqpar
from mllm_seqpar import patch_model, unpatch_model

repository = Path(__file__).resolve().parents[2]
sys.path.append(str(repository / "scripts" / "lib"))
from tiny_models.mplug_owl3 import tiny_frames, tiny_model, tiny_text  # noqa: E402

location = Path(mllm_seqpar.__file__).resolve()
if repository / "mllm_seqpar" in location.parents:
    sys.exit(f"{location} belongs to the repository; install the wheel and run this from another folder")
model, ids, frames = tiny_model(), tiny_text(2), tiny_frames(2)
settings = {"input_ids": ids, "pixel_values": frames, "max_new_tokens": 3, "do_sample": False}
expected = model.generate(**settings)
patched = patch_model(model, strategy="lv-xattn").generate(**settings)
assert torch.equal(patched, expected), (patched, expected)
unpatch_model(model)
command = ["plan", "--model", "mplug-owl3-7b", "--frames", "64", "--text", "512", "--gpus", "8"]
script = Path(sys.executable).parent / "mllm-seqpar"
plan = subprocess.run([script, *command, "--cluster", "a100-80g-4x4"], capture_output=True, text=True, check=True)
assert "patch_model" in plan.stdout, plan.stdout
sys.stdout.write(f"mllm-seqpar {mllm_seqpar.__version__} from {location.parent} works\n")
