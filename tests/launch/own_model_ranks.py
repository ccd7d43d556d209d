"""Run by ranks in fresh processes: the adapter of the installed package `captioner` is found by its entry point alone.

Each rank prints the cases that equal the unpatched model. `PYTHONPATH` has the package and tests/.
"""

import sys

import torch.distributed as dist

from captioner_cases import CASES, compare


def main() -> None:
    dist.init_process_group("gloo")
    assert "captioner_adapter" not in sys.modules
    for name, case in CASES.items():
        compare(*case)
        assert "captioner_adapter" in sys.modules, "the model was patched by something else"
        sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {name} equal\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
