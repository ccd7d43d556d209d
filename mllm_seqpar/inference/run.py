"""An inference run from its command line to the last answer.

Steps that can fail on one rank only (arguments, files, its part of the video) run first, and all ranks agree on their
result. Cheap checks precede expensive steps: a video that cannot be read ends the run before the model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.cli.progress import peak_memory
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import attempt, check_collectively, raise_on_all_ranks
from mllm_seqpar.data.chat_family import ChatFamily, chat_family
from mllm_seqpar.data.feature_store import FeatureStore, source_meta
from mllm_seqpar.data.sources import VideoSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.patching import patch_model, patch_of

from .arguments import DEFAULT_FPS, InferArguments, parse
from .encoding import EncodedVideo, encode_video, encoder_of
from .evidence_report import EvidenceReport
from .generation import Answer
from .model_loading import load_for_inference, model_files_digest, shard_weights
from .report import ENCODE_STAGE, Report, StageTimes, frames_bar
from .stored_features import feature_meta, load_video, open_store, require_replaceable, save_video


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run: the video or its features on disk, and on rank 0 what features to be saved depend on."""

    model_digest: str
    processor: Any
    source: VideoSource | None
    store: FeatureStore | None
    feature_meta: dict[str, Any]

    @property
    def family(self) -> ChatFamily:
        return chat_family(self.processor)

    def facts(self) -> dict[str, Any]:
        """Return what all ranks must have in common. Paths may differ, because each node may have its own copy."""
        facts: dict[str, Any] = {"model": self.model_digest}
        if self.source is not None:
            meta = source_meta(self.source.plan)
            facts |= {"video's size": meta["source_size"], "frames": meta["frames"], "their times": meta["frame_times"]}
        if self.store is not None:
            facts |= {"frames of the features": self.store.total_frames, "features": self.store.meta}
        return facts


def infer(argv: Sequence[str]) -> None:
    """Answer the questions of the command line `argv`; see `InferArguments`. Every rank calls this.

    Raises:
        SeqParError: on invalid arguments or files or a video that cannot be read, or if the ranks disagree.
    """
    args, problem = attempt(lambda: parse(argv))
    with launched_ranks(*((args.device, args.timeout) if args else ())) as (comm, device):
        raise_on_all_ranks(comm, "arguments", problem, asdict(args) if args else {})
        assert args is not None  # otherwise all ranks have raised
        answer_questions(args, comm, device)


def answer_questions(args: InferArguments, comm: Communicator, device: torch.device) -> None:
    """Run the steps of `infer` on the ranks of `comm`: open, load, encode, answer, report."""
    times = StageTimes(device)
    with times.measure("open"):
        inputs = check_collectively(comm, "inputs", lambda: _open(args, comm.rank), RunInputs.facts)
    with times.measure("load"):
        model = check_collectively(comm, "model", lambda: _load(args, inputs, device))
        if args.shard_weights:
            model = shard_weights(model, comm, device, encode=encoder_of(model, inputs.family))
        patch_model(model, group=comm, config=args.seqpar_config())
    video = _video(args, inputs, model, comm, times)
    report = EvidenceReport(args.evidence, args.evidence_html, shown=comm.rank == 0, source=inputs.source)
    answers = [(question, _ask(args, inputs, model, video, question, comm.rank, report)) for question in args.question]
    report.write()
    patch = patch_of(model)
    rows = comm.gather_ints([round(peak_memory(device) * 1024), patch.context.comm.bytes.total if patch else 0])
    seconds = {name: round(seconds, 4) for name, seconds in times.seconds.items()}
    memory, sent = [round(kib / 1024, 1) for kib, _ in rows], [sent for _, sent in rows]
    summary = Report(video.frames, video.visual_tokens, comm.size, seconds, answers, memory, sent, device.type)
    if comm.rank == 0:
        print(summary.summary(), file=sys.stderr, flush=True)  # noqa: T201 - standard output has only the answers
        if args.report:
            summary.write(args.report)


def _open(args: InferArguments, rank: int) -> RunInputs:
    processor, options = load_processor(args.model), args.frame_options(DEFAULT_FPS)
    family, source, store, meta = chat_family(processor), None, None, {}
    if args.video is not None:
        try:
            source = VideoSource.open(args.video, **options)
        except ImportError as error:  # the message says what to install
            raise ConfigError(str(error)) from error
    if args.features is not None:
        store = open_store(args.features, args.model, family, source, args.frame_options())
    if rank == 0:
        _create_outputs(args)
        if args.save_features is not None and source is not None:
            meta = feature_meta(source, args.model, family, options)
            require_replaceable(args.save_features, meta)
    return RunInputs(model_files_digest(args.model), processor, source, store, meta)


def _load(args: InferArguments, inputs: RunInputs, device: torch.device) -> nn.Module:
    model = load_for_inference(args.model, args.dtype, device, on_cpu=args.shard_weights)
    inputs.family.check(model)
    return model


def _create_outputs(args: InferArguments) -> None:
    """Create the output files and directories now, so that an error does not follow a long encoding."""
    try:
        if args.save_features is not None:
            Path(args.save_features).mkdir(parents=True, exist_ok=True)
        if args.report is not None:
            Path(args.report).parent.mkdir(parents=True, exist_ok=True)
            Path(args.report).touch()
        if args.evidence_html is not None:
            Path(args.evidence_html).parent.mkdir(parents=True, exist_ok=True)
            Path(args.evidence_html).touch()
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written ({error.strerror}); choose another path") from error


def _video(
    args: InferArguments, inputs: RunInputs, model: nn.Module, comm: Communicator, times: StageTimes
) -> EncodedVideo:
    store, source = inputs.store, inputs.source
    if store is not None:
        target = times.device, next(model.parameters()).dtype
        with times.measure("read features"):
            load = partial(load_video, store, inputs.family, comm, *target, mapped=args.visual_offload is not None)
            return check_collectively(comm, "features", load)
    assert source is not None  # InferArguments requires --video or --features
    show = args.progress and comm.rank == 0
    with times.measure(ENCODE_STAGE), frames_bar(len(source), "reading and encoding", show) as progress:
        on_host = args.visual_offload is not None
        options: dict[str, Any] = {"batch": args.encode_batch, "progress": progress, "on_host": on_host}
        video = encode_video(model, inputs.processor, source, group=comm, **options)
    if args.save_features is not None:
        with times.measure("save"):
            save_video(args.save_features, video, comm, inputs.feature_meta)
    return video


def _ask(
    args: InferArguments,
    inputs: RunInputs,
    model: nn.Module,
    video: EncodedVideo,
    question: str,
    rank: int,
    report: EvidenceReport,
) -> Answer:
    if rank == 0 and len(args.question) > 1:
        _write(f"> {question}\n")
    on_text = _write if rank == 0 else None
    result = report.answer(model, inputs.processor, question, video, args.sampling(), on_text=on_text)
    if rank == 0:
        _write("\n")
    report.show()
    return result


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
