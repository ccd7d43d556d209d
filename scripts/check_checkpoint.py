"""Check a downloaded checkpoint in minutes, on any machine, and print a report to attach to an issue.

    python scripts/check_checkpoint.py DIR [--ranks 2] [--report report.md]

DIR is a published checkpoint of mPLUG-Owl3, IDEFICS or Llama 3.2 Vision, or an OpenFlamingo that `convert` wrote. The
script validates the names and shapes of all tensors without loading them, loads the processor and the model, asks
about a picture and about a short video, and compares the patched model with the unpatched one. The ranks are threads
of one process that share one copy of the weights, so the memory of one model is enough. It exits with status 1 if a
check failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from checkpoint_checks.media import drawn_video, picture_file, read_video
from checkpoint_checks.model import Comparison, compare
from checkpoint_checks.rows import Row, report
from checkpoint_checks.weights import describe_files, missing_memory, names_and_shapes

from mllm_seqpar.data.chat_families import chat_family
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.model import load_for_inference
from mllm_seqpar.models.loading import load_processor

LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Mean absolute difference of the logits, relative to their standard deviation, that still counts as rounding."""
QUESTIONS = {"image": "Describe the image in one sentence.", "video": "What happens in the video?"}


def main() -> int:
    """Run all checks and print the report; return the exit status."""
    args = arguments()
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    logging.getLogger("mllm_seqpar").setLevel(logging.WARNING)  # the report says on how many ranks the model runs
    rows: list[Row] = []
    for row in checks(args):
        print(f"[{row.verdict}] {row.check}: {row.found.splitlines()[0] if row.found else ''}", flush=True)
        rows.append(row)
    text = report(args.directory, environment(), rows)
    print("\n" + text)
    if args.report is not None:
        args.report.write_text(text + "\n", encoding="utf-8")
    return 1 if any(row.ok is False for row in rows) else 0


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the checkpoint: weights, config.json, tokenizer")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the patched model, as threads (default: 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the GPU")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: float32 if it fits into memory, otherwise the checkpoint's",
    )
    parser.add_argument("--names-only", action="store_true", help="do not load the weights")
    parser.add_argument("--picture", type=Path, help="ask about this picture instead of a drawn one")
    parser.add_argument("--video", type=Path, help="ask about this video instead of a drawn one")
    parser.add_argument("--frames", type=int, default=4, help="frames of the video (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="length of each answer (default: 24)")
    parser.add_argument("--report", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    for name in ("ranks", "frames", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    return args


def checks(args: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for each check, in the order of their cost; stop when the next ones cannot run."""
    path = str(args.directory)
    for check, call in (("files", describe_files), ("names and shapes", names_and_shapes)):
        row = attempt(check, lambda call=call: call(path))
        yield row
        if row.ok is False:
            return
    found = []
    row = attempt("processor", lambda: found.append(load_processor(path)) or describe_processor(found[0]))
    yield row
    if row.ok is False or args.names_only:
        return
    dtype, problem = missing_memory(path, args.dtype, args.device)
    if problem:
        yield Row("model", None, problem)
        return
    start = time.monotonic()
    models = []
    kind, device = str(dtype).removeprefix("torch."), torch.device(args.device)
    row = attempt("model", lambda: models.append(load_for_inference(path, kind, device)) or "")
    if row.ok is False:
        yield row
        return
    yield Row("model", True, f"{dtype} on {args.device}, loaded in {time.monotonic() - start:.0f} s")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("image", "video"):
            yield attempt(kind, lambda kind=kind: asked(args, models[0], found[0], kind, Path(folder)))


def asked(args: argparse.Namespace, model: torch.nn.Module, processor: object, kind: str, folder: Path) -> str:
    """Compare patched and unpatched on one question; return what was found.

    Raises:
        ValueError: the patched model differs from the unpatched one by more than rounding explains.
    """
    start = time.monotonic()
    family = chat_family(processor)
    media: FrameSource
    if kind == "image":
        media = family.still(picture_file(folder) if args.picture is None else args.picture)
    else:
        media = drawn_video(args.frames) if args.video is None else read_video(args.video, args.frames)
    result = compare(model, family, media, kind, QUESTIONS[kind], args.ranks, args.max_new_tokens)
    dtype = next(model.parameters()).dtype
    text = describe(result, args.ranks) + f"\n{time.monotonic() - start:.0f} s"
    if not result.finite:
        raise ValueError(f"the unpatched model's logits are not finite\n{text}")
    if max(result.difference, result.disagreement) > LARGEST_DIFFERENCE[dtype]:
        raise ValueError(f"the patched model differs by more than {LARGEST_DIFFERENCE[dtype]:g} in {dtype}\n{text}")
    return text


def describe(result: Comparison, ranks: int) -> str:
    """Return the lines of a report about one comparison."""
    return (
        f"patched on {ranks} ranks against unpatched: logits differ by {result.difference:.1e} of their standard "
        f"deviation; generated tokens are within {result.disagreement:.1e} of the unpatched model's most likely ones\n"
        f"prompt of {result.prompt_tokens} tokens for {result.frames} frames: {result.prompt!r}\n"
        f"answer: {result.answer!r}"
    )


def describe_processor(processor: object) -> str:
    """Return the class and the options of a processor."""
    options = {
        name: value
        for part in (processor, getattr(processor, "image_processor", None))
        for name, value in vars(part or object).items()
        if isinstance(value, (bool, int, float, str, dict)) and not name.startswith("_") and len(repr(value)) < 80
    }
    tokenizer = getattr(processor, "tokenizer", None)
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{type(processor).__name__} with {type(tokenizer).__name__} of {len(tokenizer)} tokens\n{named}"  # type: ignore[arg-type]


def attempt(check: str, call: Callable[[], str]) -> Row:
    """Return a row with what `call` returns, or with its error: a failure ends no other check."""
    try:
        return Row(check, True, call())
    except (SeqParError, ValueError, OSError) as error:
        return Row(check, False, str(error))
    except Exception as error:
        return Row(check, False, f"{type(error).__name__}: {error}")


def environment() -> str:
    """Return versions and hardware, for the report."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {gpu}"
    )


if __name__ == "__main__":
    sys.exit(main())
