"""Check a downloaded checkpoint within minutes, on any machine, and print a report to attach to an issue.

    python scripts/check_checkpoint.py DIR [--ranks 2] [--report report.md]

DIR is a published checkpoint of mPLUG-Owl3, IDEFICS or Llama 3.2 Vision, or an OpenFlamingo written by `convert`. The
script validates the names and shapes of all tensors without loading them, loads the processor and the model, asks
about an image and about a short video, and compares the patched model with the unpatched one. The ranks are threads
of one process that share one copy of the weights, so the memory of one model is sufficient. The exit status is 1 if a
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_checks.comparison import compare
from checkpoint_checks.media import drawn_video, image_file
from checkpoint_checks.weights import describe_files, missing_memory, names_and_shapes

from mllm_seqpar.cli.launch import DTYPES
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.sources import FrameSource, VideoSource
from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.engine import load_for_inference
from mllm_seqpar.models.loading import load_processor

LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The largest mean absolute difference of the logits, relative to their standard deviation, that rounding explains."""
QUESTIONS = {"image": "Describe the image in one sentence.", "video": "What happens in the video?"}


@dataclass(frozen=True)
class Row:
    check: str
    ok: bool | None  # None if it could not run
    found: str  # one or more lines

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "FAILED", None: "not run"}[self.ok]


def main() -> int:
    args = arguments()
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    logging.getLogger("mllm_seqpar").setLevel(logging.WARNING)  # The report states the number of ranks.
    rows: list[Row] = []
    for row in checks(args):
        print(f"[{row.verdict}] {row.check}: {row.found.splitlines()[0] if row.found else ''}", flush=True)
        rows.append(row)
    lines = [f"## Check of the checkpoint {args.directory.resolve().name}", "", environment(), ""]
    for row in rows:
        first, *more = row.found.splitlines() or [""]
        lines += [f"- **{row.check}: {row.verdict}.** {first}", *(f"  - {line}" for line in more)]
    print("\n" + "\n".join(lines))
    if args.report is not None:
        args.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if any(row.ok is False for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the checkpoint: weights, config.json, tokenizer")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the patched model, as threads (default: 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the GPU")
    dtype = "auto: float32 if it fits into memory, otherwise the checkpoint's"
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype)
    parser.add_argument("--names-only", action="store_true", help="do not load the weights")
    parser.add_argument("--image", type=Path, help="ask about this image instead of a drawn one")
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
    """Yield one row for each check, cheap checks first; stop if the later checks cannot run."""
    path = str(args.directory)
    for check, call in (("files", describe_files), ("names and shapes", names_and_shapes)):
        row, _ = attempt(check, lambda call=call: (call(path), None))
        yield row
        if not row.ok:
            return
    row, processor = attempt("processor", lambda: describe_processor(load_processor(path)))
    yield row
    if not row.ok or args.names_only:
        return
    dtype, problem = missing_memory(path, args.dtype, args.device)
    if problem:
        yield Row("model", None, problem)
        return

    def model_row() -> tuple[str, Any]:
        start = time.monotonic()
        model = load_for_inference(path, str(dtype).removeprefix("torch."), torch.device(args.device))
        return f"{dtype} on {args.device}, loaded in {time.monotonic() - start:.0f} s", model

    row, model = attempt("model", model_row)
    yield row
    if not row.ok:
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("image", "video"):
            yield attempt(kind, lambda kind=kind: (ask(args, model, processor, kind, Path(folder)), None))[0]


def ask(args: argparse.Namespace, model: torch.nn.Module, processor: Any, kind: str, folder: Path) -> str:
    """Return the findings of one question; raise ValueError if the models differ by more than rounding explains."""
    start = time.monotonic()
    family = chat_family(processor)
    media: FrameSource
    if kind == "image":
        media = family.image_source(image_file(folder) if args.image is None else args.image)
    elif args.video is None:
        media = drawn_video(args.frames)
    else:
        media = VideoSource.open(args.video, num_frames=args.frames)
    result = compare(model, family, media, kind, QUESTIONS[kind], args.ranks, args.max_new_tokens)
    dtype = next(model.parameters()).dtype
    text = (
        f"patched on {args.ranks} ranks against unpatched: logits differ by {result.difference:.1e} of their standard "
        f"deviation; generated tokens are within {result.disagreement:.1e} of the unpatched model's most likely ones\n"
        f"prompt of {result.prompt_tokens} tokens for {result.frames} frames: {result.prompt!r}\n"
        f"answer: {result.answer!r}\n{time.monotonic() - start:.0f} s"
    )
    if not result.finite:
        raise ValueError(f"the unpatched model's logits are not finite\n{text}")
    if max(result.difference, result.disagreement) > LARGEST_DIFFERENCE[dtype]:
        raise ValueError(f"the patched model differs by more than {LARGEST_DIFFERENCE[dtype]:g} in {dtype}\n{text}")
    return text


def describe_processor(processor: Any) -> tuple[str, Any]:
    """Return the class and the options of a processor as text, and the processor."""
    options = {
        name: value
        for part in (processor, getattr(processor, "image_processor", None))
        for name, value in vars(part or object).items()
        if isinstance(value, (bool, int, float, str, dict)) and not name.startswith("_") and len(repr(value)) < 80
    }
    tokenizer = processor.tokenizer
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{type(processor).__name__} with {type(tokenizer).__name__} of {len(tokenizer)} tokens\n{named}", processor


def attempt(check: str, call: Callable[[], tuple[str, Any]]) -> tuple[Row, Any]:
    """Return a row with the findings that `call` returns, and its result; if it raises, a row with the error."""
    try:
        found, result = call()
        return Row(check, True, found), result
    except Exception as error:
        name = "" if isinstance(error, (SeqParError, ValueError, OSError)) else f"{type(error).__name__}: "
        return Row(check, False, f"{name}{error}"), None


def environment() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {gpu}"
    )


if __name__ == "__main__":
    sys.exit(main())
