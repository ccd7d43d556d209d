"""Time decoding over ranks whose network has a latency: milliseconds per token, this checkout beside another one.

    git worktree add /tmp/before 73448db
    python scripts/bench/decode_latency.py --before /tmp/before [--ranks 2 4] [--round-trip-ms 1] [--repeats 3]

Each rank runs in a network namespace (`delayed_links`). The model is mPLUG-Owl3 with 8 layers of width 64, 4 of them
hyper layers. In the rows "text sharded" K and V of the prompt stay sharded too (`shard_prompt_from=2`). Both checkouts
run alternately; a figure is the median over the repetitions of the median time of a token. All ranks must generate the
same tokens as one unpatched process. Exchanges are those of attention for each token, counted on rank 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of this project; without it, only this one runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--round-trip-ms", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of)
        return
    from delayed_links import launch

    checkouts = {"before": arguments.before, "after": HERE.parents[2]}
    print(f"{'ranks':>5} {'text':>10} {'checkout':>9} {'ms per token':>13} {'exchanges':>10}")
    for ranks in arguments.ranks:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(arguments.repeats):
            for name, checkout in checkouts.items():
                if checkout is not None:
                    for text, row in measured(launch, ranks, checkout, arguments.round_trip_ms).items():
                        found.setdefault((text, name), []).append(row)
        for (text, name), rows in sorted(found.items(), reverse=True):
            milliseconds = statistics.median(row["ms"] for row in rows)
            print(f"{ranks:>5} {text:>10} {name:>9} {milliseconds:>13.2f} {rows[0]['exchanges']:>10.1f}", flush=True)


def measured(launch: Any, ranks: int, checkout: Path, round_trip_ms: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE), "--rank-of", str(out)]
        if launch(ranks, command, round_trip_ms, {"PYTHONPATH": f"{checkout}{os.pathsep}{HERE.parent}"}):
            raise SystemExit(f"a rank of {checkout} failed")
        return dict(json.loads(out.read_text()))


def run_rank(out: Path) -> None:
    """Measure one rank, with the package that PYTHONPATH names; rank 0 writes its rows to `out`."""
    import torch
    import torch.distributed as dist

    use_patches_of(Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]))
    from host_path import Clock
    from small_models import MEDIA, TEXT, make_owl, words
    from transformers import LogitsProcessorList

    from mllm_seqpar import patch_model, unpatch_model
    from mllm_seqpar.patching.patch import patch_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    tower = sizes | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1}
    model = make_owl(TEXT | sizes | {"num_hidden_layers": 8}, kv_heads=2, hyper_layers=[1, 3, 5, 7], tower=tower)
    ids = torch.cat([torch.full((1, 8), MEDIA), words(24)], dim=1)
    frames = torch.randn(8, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    greedy = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, pixel_values=frames, **greedy)
    rows: dict[str, Any] = {}
    for text, prompt in (("whole", None), ("sharded", 2)):
        patch_model(model, shard_prompt_from=prompt)
        comm = patch_of(model).context.comm  # type: ignore[union-attr]
        calls = count_exchanges(comm)
        model.generate(ids, pixel_values=frames, **greedy | {"max_new_tokens": 3})
        clock = Clock(time.perf_counter, calls)
        dist.barrier()
        tokens = model.generate(ids, pixel_values=frames, logits_processor=LogitsProcessorList([clock]), **greedy)
        if not torch.equal(tokens, expected):
            raise SystemExit(f"rank {comm.rank}: tokens differ from the unpatched model's")
        seconds = [after - before for before, after in pairwise(clock.times)]
        exchanges = (clock.counts[-1] - clock.counts[0]) / (len(clock.counts) - 1)
        rows[text] = {"ms": statistics.median(seconds) * 1e3, "exchanges": exchanges}
        unpatch_model(model)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def use_patches_of(checkout: Path) -> None:
    """Import `mllm_seqpar.patches` from a checkout; an editable installation would find it in its own."""
    folder = checkout / "patches"
    spec = importlib.util.spec_from_file_location(
        "mllm_seqpar.patches", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["mllm_seqpar.patches"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def count_exchanges(comm: Any) -> list[int]:
    """Return a list whose only entry counts the exchanges and all-gathers of this communicator from now on."""
    count = [0]

    def counted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return method(*args, **kwargs)

        return call

    for name in ("exchange", "all_gather"):
        setattr(comm, name, counted(getattr(comm, name)))
    return count


if __name__ == "__main__":
    main()
