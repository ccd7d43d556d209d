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
import copy
import json
import logging
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from mllm_seqpar import patch_model
from mllm_seqpar.chats.chat_family import ChatFamily, chat_family
from mllm_seqpar.chats.clip import FrameSource, ImageListSource, VideoSource
from mllm_seqpar.cli.doctor import host_memory
from mllm_seqpar.cli.launch import DTYPES
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError, SeqParError
from mllm_seqpar.inference.engine import load_for_inference
from mllm_seqpar.models.loading import load_model, load_processor

LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The largest mean absolute difference of the logits, relative to their standard deviation, that rounding explains."""
QUESTIONS = {"image": "Describe the image in one sentence.", "video": "What happens in the video?"}
PUBLISHED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MEMORY_FACTOR = 1.25
"""Memory needed relative to the weights, with activations of a few frames."""
TRANSFER_S = 3600.0
"""Time limit of a transfer: a rank of a large model on a CPU may compute for long before it sends."""
SIZE = (288, 512)
"""The height and width of the frames that are made for the check."""


VERDICTS = {True: "passed", False: "FAILED", None: "not run"}


class NotRun(Exception):
    """A check cannot run on this machine."""


def main() -> int:
    args = arguments()
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    logging.getLogger("mllm_seqpar").setLevel(logging.WARNING)  # The report states the number of ranks.
    lines, failed = [f"## Check of the checkpoint {args.directory.resolve().name}", "", environment(), ""], False
    for check, ok, findings in Checkpoint(args).checks():
        first, *more = findings.splitlines() or [""]
        print(f"[{VERDICTS[ok]}] {check}: {first}", flush=True)
        lines += [f"- **{check}: {VERDICTS[ok]}.** {first}", *(f"  - {line}" for line in more)]
        failed |= ok is False
    print("\n" + "\n".join(lines))
    if args.report is not None:
        args.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


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


class Checkpoint:
    """The checks of a directory. Each returns its findings, one or more lines, or raises what is wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.path = args, str(args.directory)

    def checks(self) -> Iterator[tuple[str, bool | None, str]]:
        """Yield the name of each check, whether it passed (None: it cannot run), and its findings, cheap checks first.

        Later checks need the results of earlier ones, but those of the image and the video are independent.
        """
        checks: dict[str, Callable[[], str]] = {
            "files": self.files,
            "names and shapes": self.names_and_shapes,
            "processor": self.load_processor,
        }
        if not self.args.names_only:
            checks |= {
                "model": self.load_model,
                "image": partial(self.ask, "image"),
                "video": partial(self.ask, "video"),
            }
        for check, run in checks.items():
            try:
                ok, findings = True, run()
            except NotRun as error:
                ok, findings = None, str(error)
            except Exception as error:
                name = "" if isinstance(error, (SeqParError, ValueError, OSError)) else f"{type(error).__name__}: "
                ok, findings = False, f"{name}{error}"
            yield check, ok, findings
            if not ok and check not in QUESTIONS:
                return

    def files(self) -> str:
        """Return the config's model type, the number of tensors by dtype, their size, and the other files."""
        try:
            config = json.loads((Path(self.path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            message = f"{self.path}: config.json cannot be read ({error}); pass the directory of a checkpoint"
            raise ConfigError(message) from error
        tensors = headers(self.path)
        kinds = Counter(dtype for dtype, _ in tensors.values())
        total = sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))
        others = sorted(file.name for file in Path(self.path).iterdir() if file.suffix != ".safetensors")
        numbers = ", ".join(f"{count} {dtype}" for dtype, count in kinds.items())
        size = f"{len(tensors)} tensors, {total / 2**30:.2f} GiB, {numbers}"
        return f"model_type {config.get('model_type')!r}, {size}\nother files: {', '.join(others)}"

    def names_and_shapes(self) -> str:
        """Compare names and shapes in the files with those of the model, on the meta device, without memory."""
        model: Any = load_model(self.path, dtype="auto", device_map="meta")
        config = model.config
        names = ("gate", "projector_layers", "hyper_layers", "cross_layer_interval", "additional_vocab_size")
        facts = ", ".join(f"{name}={getattr(config, name)}" for name in names if hasattr(config, name))
        size = sum(p.numel() for p in model.parameters()) / 1e9
        return f"{type(model).__name__} of {size:.3f} billion parameters: all names and shapes match\n{facts}".strip()

    def load_processor(self) -> str:
        self.processor = processor = load_processor(self.path)
        options = {
            name: value
            for part in (processor, getattr(processor, "image_processor", None))
            for name, value in vars(part or object).items()
            if isinstance(value, (bool, int, float, str, dict)) and not name.startswith("_") and len(repr(value)) < 80
        }
        tokenizer = processor.tokenizer
        named = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{type(processor).__name__} with {type(tokenizer).__name__} of {len(tokenizer)} tokens\n{named}"

    def load_model(self) -> str:
        start, dtype = time.monotonic(), fitting_dtype(self.path, self.args.dtype, self.args.device)
        device = torch.device(self.args.device)
        self.model = load_for_inference(self.path, str(dtype).removeprefix("torch."), device)
        return f"{dtype} on {device}, loaded in {time.monotonic() - start:.0f} s"

    def ask(self, kind: str) -> str:
        """Return the findings of one question; raise ValueError if the models differ by more than rounding explains."""
        start, args = time.monotonic(), self.args
        chat_format = chat_family(self.processor)
        media: FrameSource
        if kind == "image":
            media = chat_format.still_frames(ImageListSource([args.image or disc(0.5, (220, 30, 30))]))
        elif args.video is not None:
            media = VideoSource.open(args.video, num_frames=args.frames)
        else:
            places = torch.linspace(0.2, 0.8, args.frames).tolist()
            media = ImageListSource([disc(place, (30, 60, 220)) for place in places])
        largest, text = compare(self.model, chat_format, media, kind, args.ranks, args.max_new_tokens)
        text += f"\n{time.monotonic() - start:.0f} s"
        dtype = next(self.model.parameters()).dtype
        limit = LARGEST_DIFFERENCE[dtype]
        if not largest <= limit:
            raise ValueError(f"the patched model differs by more than {limit:g} in {dtype}\n{text}")
        return text


@torch.no_grad()
def compare(
    model: nn.Module, chat_format: ChatFamily, media: FrameSource, kind: str, ranks: int, max_new_tokens: int
) -> tuple[float, str]:
    """Ask about `media`, an "image" or a "video", with the model unpatched and patched on `ranks` ranks.

    The ranks are threads that share one copy of the weights.

    Returns:
        The larger of two differences of the patched from the unpatched model, relative to the standard deviation of the
        logits and over all ranks: the mean absolute difference of the logits, and `disagreement`; and the findings.
    """
    weight = next(model.parameters())
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": QUESTIONS[kind]}]}]
    text = chat_format.text([messages], [[media]], add_generation_prompt=True)
    frames = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in chat_format.unsharded(media).items()
    }
    arguments = {name: x.to(weight.device) for name, x in chat_format.arguments(text).items()}
    logits = model(**arguments, **frames).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError("the unpatched model's logits are not finite")

    def one_rank(comm: Communicator) -> tuple[float, Tensor]:
        with torch.no_grad():
            shared = {id(x): x for x in chain(model.parameters(), model.buffers())}
            patched: Any = patch_model(copy.deepcopy(model, shared), group=comm)
            difference = (patched(**arguments, **frames).logits[0].float() - logits).abs().mean() / logits.std()
            options = chat_format.generation(patched) | {"do_sample": False, "max_new_tokens": max_new_tokens}
            return float(difference), patched.generate(**arguments, **frames, **options)[0]

    results = run_loopback(ranks, one_rank, timeout=TRANSFER_S)
    length, decode = text.input_ids.shape[1], chat_format.tokenizer.decode
    tokens = results[0][1][length:]
    difference = max(difference for difference, _ in results)
    below = disagreement(model, chat_format, arguments, frames, tokens)
    return max(difference, below), (
        f"patched on {ranks} ranks against unpatched: logits differ by {difference:.1e} of their standard "
        f"deviation; generated tokens are within {below:.1e} of the unpatched model's most likely ones\n"
        f"prompt of {length} tokens for {len(media)} frames: {decode(text.input_ids[0])!r}\n"
        f"answer: {decode(tokens, skip_special_tokens=True)!r}"
    )


def disagreement(
    model: Any, chat_format: ChatFamily, arguments: dict[str, Tensor], frames: dict[str, Tensor], tokens: Tensor
) -> float:
    """Return how far the unpatched model's logit of a generated token is below its largest logit, at most.

    It is relative to the standard deviation of the logits; 0: both choose the same tokens.
    """
    length, added = arguments[chat_format.ids_name].shape[1], tokens.shape[0]
    extended = dict(arguments)
    for name, x in arguments.items():
        if name == chat_format.ids_name:
            extended[name] = torch.cat([x, tokens[None]], dim=1)
        elif name in ("attention_mask", "mm_token_type_ids") or (x.dim() > 2 and x.shape[1] == length):
            # The answer attends to the same images as the last token of the prompt.
            extended[name] = torch.cat([x, x[:, -1:].expand(-1, added, *x.shape[2:])], dim=1)
    logits = model(**extended, **frames).logits[0, length - 1 : -1].float()
    for ids in chat_format.generation(model).get("bad_words_ids") or ():
        if len(ids) == 1:
            logits[:, ids] = -torch.inf
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    finite = logits[logits.isfinite()]
    return float(((logits.amax(dim=1) - chosen) / finite.std()).max())


def environment() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {gpu}"
    )


def headers(path: str) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor of a directory from the headers of its safetensors files."""
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    if not found:
        raise ConfigError(f"{path}: no *.safetensors files; mllm-seqpar convert writes them")
    return found


def fitting_dtype(path: str, dtype: str, device: str) -> torch.dtype:
    """Return the dtype to load in; raise NotRun if the model does not fit into the memory of `device`."""
    kinds = Counter({name: 0 for name in PUBLISHED_DTYPES})
    for kind, shape in headers(path).values():
        kinds[kind] += prod(shape)
    published = PUBLISHED_DTYPES.get(kinds.most_common(1)[0][0], torch.float32)
    free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else host_memory()
    for candidate in [torch.float32, published] if dtype == "auto" else [getattr(torch, dtype)]:
        need = MEMORY_FACTOR * kinds.total() * candidate.itemsize
        if free is None or need <= free:
            return candidate
    raise NotRun(
        f"{need / 2**30:.1f} GiB are needed in {candidate}, {free / 2**30:.1f} GiB are free on {device}; "
        "run this on a machine with more memory"
    )


def disc(x: float, colour: tuple[int, int, int]) -> Tensor:
    """Return an image (3, H, W) of a disc on grey; `x` is its centre as a fraction of the width."""
    height, width = SIZE
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    inside = (columns - x * width) ** 2 + (rows - height / 2) ** 2 < (height / 5) ** 2
    image = torch.full((3, height, width), 200, dtype=torch.uint8)
    return torch.where(inside, torch.tensor(colour, dtype=torch.uint8)[:, None, None], image)


if __name__ == "__main__":
    sys.exit(main())
