"""An inference run from its command line to the last answer.

What can be wrong on one rank only (arguments, files, its part of the video) is tried, then agreed upon by all ranks,
and the cheap before the dear: a video that cannot be read ends the run before the model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.collective_check import attempt, check_collectively, raise_on_all_ranks
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.features import FeatureStore, source_meta
from mllm_seqpar.data.sources import VideoSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.patching import patch_of

from .arguments import InferArguments, parse
from .encoding import EncodedVideo, encode_video
from .feature_files import load_video, open_store, origin, save_video
from .generation import Answer, answer
from .model import distribute, load_for_inference, model_files
from .report import ENCODE, Stages, frames_bar, make_report


@dataclass(frozen=True)
class RunInputs:
    """What a run reads: the video, its features, or both; and how text and frames become tensors.

    Attributes:
        model: a digest of the model's files.
        processor: of that model.
        source: the video.
        store: features of it that are on disk.
        origin: what features that are to be saved were made of; on rank 0.
    """

    model: str
    processor: Any
    source: VideoSource | None
    store: FeatureStore | None
    origin: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """What all ranks must have in common. Not paths: each node may have its own copy."""
        facts: dict[str, Any] = {"model": self.model}
        if self.source is not None:
            meta = source_meta(self.source.plan)
            facts |= {"video's size": meta["source_size"], "frames": meta["frames"], "their times": meta["frame_times"]}
        if self.store is not None:
            facts |= {"frames of the features": self.store.total_frames, "features": self.store.meta}
        return facts


def infer(argv: Sequence[str]) -> None:
    """Answers as the command line says; see `InferArguments`. Every rank calls it.

    Raises:
        SeqParError: bad arguments, files, a video that cannot be read; ranks that do not agree.
    """
    args, problem = attempt(lambda: parse(argv))
    with launched_ranks(*((args.device, args.timeout) if args else ())) as (comm, device):
        raise_on_all_ranks(comm, "arguments", problem, asdict(args) if args else {})
        assert args is not None  # or all ranks have raised
        _run(args, comm, device)


def _run(args: InferArguments, comm: Communicator, device: torch.device) -> None:
    stages = Stages(device)
    with stages("open"):
        inputs = check_collectively(comm, "inputs", lambda: _open(args, saves=comm.rank == 0), RunInputs.facts)
    with stages("load"):
        model = check_collectively(comm, "model", lambda: _load(args, inputs, device))
        model = distribute(model, inputs.processor, comm, device, args.seqpar_config(), shard=args.shard_weights)
    video = _video(args, inputs, model, comm, device, stages)
    answers = [(question, _ask(args, inputs, model, video, question, comm.rank)) for question in args.question]
    patch = patch_of(model)
    report = make_report(comm, device, video, stages.seconds, answers, patch.context.comm.bytes.total if patch else 0)
    if comm.rank == 0:
        print(report.line(), file=sys.stderr, flush=True)  # noqa: T201 - standard output has the answers alone
        if args.report:
            report.write(args.report)


def _open(args: InferArguments, saves: bool) -> RunInputs:
    processor = load_processor(args.model)
    source = None if args.video is None else _open_video(args.video, args.frames_of_video())
    store = None
    if args.features is not None:
        store = open_store(args.features, args.model, chat_family(processor), source, args.frame_options())
    if saves:
        _try_outputs(args)
    made_of = {}
    if saves and args.save_features is not None and source is not None:
        made_of = origin(source, args.model, chat_family(processor), args.frames_of_video())
    return RunInputs(model_files(args.model), processor, source, store, made_of)


def _load(args: InferArguments, inputs: RunInputs, device: torch.device) -> nn.Module:
    model = load_for_inference(args.model, args.dtype, device, on_cpu=args.shard_weights)
    chat_family(inputs.processor).check(model)
    return model


def _open_video(path: str, frames: dict[str, Any]) -> VideoSource:
    try:
        return VideoSource.open(path, **frames)
    except ImportError as error:  # the message says what to install
        raise ConfigError(str(error)) from error


def _try_outputs(args: InferArguments) -> None:
    """What cannot be written is better known before the video is encoded than after."""
    try:
        if args.save_features is not None:
            Path(args.save_features).mkdir(parents=True, exist_ok=True)
        if args.report is not None:
            Path(args.report).parent.mkdir(parents=True, exist_ok=True)
            Path(args.report).touch()
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written ({error.strerror}); choose another place") from error


def _video(
    args: InferArguments, inputs: RunInputs, model: nn.Module, comm: Communicator, device: torch.device, stages: Stages
) -> EncodedVideo:
    """The encoded video, by the shortest way."""
    if inputs.store is not None:
        store, dtype = inputs.store, next(model.parameters()).dtype
        with stages("read features"):
            return check_collectively(
                comm, "features", lambda: load_video(store, chat_family(inputs.processor), comm, device, dtype)
            )
    source = inputs.source
    assert source is not None  # the arguments say so
    shows = args.progress and comm.rank == 0
    with stages(ENCODE), frames_bar(len(source), "reading and encoding", shows) as progress:
        video = encode_video(model, inputs.processor, source, group=comm, batch=args.encode_batch, progress=progress)
    if args.save_features is not None:
        with stages("save"):
            save_video(args.save_features, video, comm, inputs.origin)
    return video


def _ask(
    args: InferArguments, inputs: RunInputs, model: nn.Module, video: EncodedVideo, question: str, rank: int
) -> Answer:
    """One answer, written to standard output by rank 0 as it comes."""
    if rank == 0 and len(args.question) > 1:
        _write(f"> {question}\n")
    result = answer(model, inputs.processor, question, video, args.sampling(), on_text=_write if rank == 0 else None)
    if rank == 0:
        _write("\n")
    return result


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
