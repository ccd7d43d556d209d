"""Count the Python calls and files of this project that the forward pass of one hyper layer goes through on each rank.

    python scripts/bench/host_path.py --ranks 2 --strategy lv-xattn

A tiny mPLUG-Owl3 runs on loopback ranks. The first pass of the model fills lazy state; the last hyper layer of the
second pass is counted with `sys.setprofile` (generators and comprehension frames count as calls).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from small_models import MEDIA, TEXT, make_owl

import mllm_seqpar
from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback

ROOTS = tuple(str(Path(path).resolve()) for path in (*mllm_seqpar.__path__, Path(__file__).parents[2] / "patches"))


def tiny_model() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    tower = sizes | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
    return make_owl(TEXT | sizes | {"num_hidden_layers": 4}, kv_heads=2, hyper_layers=[1, 3], tower=tower)


def count_calls(comm: Communicator, model: Any, options: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Return the calls by (file, function) of the last hyper layer's attention in the second forward pass."""
    patched = patch_model(copy.deepcopy(model), group=comm, **options)
    ids = torch.randint(3, MEDIA, (1, 24), generator=torch.Generator().manual_seed(0))
    ids[0, [2, 6, 10, 14]] = MEDIA
    frames = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    calls: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOTS):
            calls[name, frame.f_code.co_name] += 1

    attention = patched.language_model.model.layers[2].self_attn
    patched(input_ids=ids, pixel_values=frames, use_cache=False)
    attention.register_forward_pre_hook(lambda *_: sys.setprofile(profile))
    attention.register_forward_hook(lambda *_: sys.setprofile(None))
    patched(input_ids=ids, pixel_values=frames, use_cache=False)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="lv-xattn")
    parser.add_argument("--list", action="store_true", help="list the functions that rank 0 calls")
    arguments = parser.parse_args()
    found = run_loopback(arguments.ranks, count_calls, tiny_model(), {"strategy": arguments.strategy})
    for rank, calls in enumerate(found):
        print(f"rank {rank}: {sum(calls.values())} calls in {len({name for name, _ in calls})} files")
    for (name, function), number in found[0].most_common() if arguments.list else ():
        print(f"{number:5d}  {'/'.join(Path(name).parts[-3:])}:{function}")


if __name__ == "__main__":
    main()
