"""`mllm-seqpar ask`: questions about long videos, from the opened files to the last answer, and data sets of questions.

    mllm-seqpar ask --model DIR --video movie.mp4 --question "Who opens the door?"
    accelerate launch -m mllm_seqpar ask --model DIR --questions questions.jsonl --output answers.jsonl

Any launcher starts several ranks; without one, the program is one process. Steps that can fail on one rank only
(arguments, files, its part of the video) run first, and all ranks agree on their result. Cheap checks precede expensive
steps: a video that cannot be read ends the run before the model is loaded. If one of several videos cannot be used, it
is reported, and the questions about the others are answered.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar.chats.clip import FrameSource, VideoSource
from mllm_seqpar.chats.store import FeatureStore
from mllm_seqpar.cli.launch import ranks_with_options
from mllm_seqpar.cli.outputs import require_writable, require_writable_directory, write_text
from mllm_seqpar.cli.program_exit import FAILED
from mllm_seqpar.cli.progress import Clock, FramesBar, note, peak_memory, quiet_transformers, say
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, NonFiniteLogitsError, VideoError, first_line, writing
from mllm_seqpar.patching import patch_of
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES
from mllm_seqpar.videos.media_files import VIDEO_SUFFIXES
from mllm_seqpar.videos.video import source_meta

from .arguments import AskOptions, parse
from .conversation import Conversation
from .data_set import answer_data_set
from .encoding import PARTS
from .engine import Engine
from .evidence import MOMENTS, Evidence, evidence_values
from .evidence_page import index_entry, write_evidence_index, write_evidence_page
from .generation import Answer
from .job import JobError
from .stored_features import feature_meta, load_video, open_store, require_replaceable, save_video

ENCODE_STAGE = "read and encode"
"""The stage whose number of frames per second is reported."""


def ask(argv: Sequence[str]) -> int:
    """Answer the questions of the options `argv` (`AskOptions`); return the exit status. Every rank calls this.

    Raises:
        SeqParError: on invalid arguments or files or a video that cannot be read, or if the ranks disagree.
    """
    quiet_transformers()
    with ranks_with_options(lambda: parse(argv)) as (args, comm, device):
        failures = (ask_videos if args.questions is None else answer_data_set)(args, comm, device)
    return FAILED if failures else 0


@dataclass(frozen=True, kw_only=True)
class _Video:
    """A video of the run, its features on disk, or both, and the output paths of its features and its evidence page."""

    video: str | None = None
    features: str | None = None
    save_to: str | None = None
    page: str | None = None
    source: FrameSource | None = None  # after `VideoRun.open`, as `store`
    store: FeatureStore | None = None
    feature_meta: Mapping[str, Any] = field(default_factory=dict)  # on rank 0, of features to be saved

    @property
    def name(self) -> str:
        return self.video or self.features or ""

    def facts(self) -> dict[str, Any]:
        """Return what all ranks must have in common."""
        facts: dict[str, Any] = {}
        if isinstance(self.source, VideoSource):
            meta = source_meta(self.source.plan)
            facts |= {"video's size": meta["source_size"], "frames": meta["frames"], "their times": meta["frame_times"]}
        if self.store is not None:
            facts |= {"frames of the features": self.store.total_frames, "features": self.store.meta}
        return facts


def ask_videos(args: AskOptions, comm: Communicator, device: torch.device) -> int:
    """Answer each question about each video on the ranks of `comm`: open, load, encode, answer, report.

    Returns:
        The number of videos and questions without an answer, while others have one; the same on every rank.

    Raises:
        VideoError: on all ranks, if no video can be used.
        NonFiniteLogitsError: on all ranks, if no question has an answer.
    """
    run = VideoRun(args, comm, device)
    if videos := run.open():
        for video in videos:
            run.ask(video)
        run.report()
    return run.report_faults()


class VideoRun:
    """The videos of a run, the answers so far, and the faults of videos that cannot be used."""

    def __init__(self, args: AskOptions, comm: Communicator, device: torch.device) -> None:
        self._args, self._comm, self._device = args, comm, device
        self._shown = comm.rank == 0
        self._times = Clock(device, synchronize=True)
        self._answers: list[tuple[str, str, Answer | NonFiniteLogitsError]] = []  # name of the video, question
        self._faults: list[str] = []
        self._pages: list[dict[str, Any]] = []
        self._frames = self._visual_tokens = 0  # tokens of this rank
        self._parts: Counter[str] = Counter()  # seconds; Counter adds them

    def open(self) -> list[_Video]:
        """Open all inputs, load the model, and return the videos that can be used."""

        def names(videos: Sequence[_Video]) -> dict[str, Any]:
            # Directories may differ, because each node may have its own copy.
            return {"videos": [os.path.basename(video.name) for video in videos] if len(videos) > 1 else 1}

        with self._times.measure("open"):
            self._engine = Engine(self._args, self._comm, self._device)
            self._videos = agree(self._comm, "inputs", lambda: _videos(self._args, create=self._shown), names)
            opened = []
            for video in self._videos:
                step = partial(agree, self._comm, "inputs", partial(self._open_video, video), _Video.facts)
                try:
                    opened.append(self._engine.settled(step))
                except JobError as fault:
                    self._fail(fault)
        if opened:
            with self._times.measure("load"):
                self._engine.load()
        return opened

    def _open_video(self, video: _Video) -> _Video:
        args, chat_format, frames = self._args, self._engine.chat_format, self._args.frame_choice().over(DEFAULT_FRAMES)
        source, meta = None, {}
        if video.video is not None:
            source = VideoSource.open(video.video, **vars(frames), **args.decoding())
            if self._shown and video.save_to is not None:
                meta = feature_meta(source, args.model, chat_format, frames)
                require_replaceable(video.save_to, meta)
        if video.features is None:
            return replace(video, source=source, feature_meta=meta)
        store = open_store(video.features, args.model, chat_format, source, args.frame_choice())
        shown = chat_format.stored_frames(store.total_frames, store.meta) if source is None else source
        return replace(video, source=shown, store=store)

    def ask(self, video: _Video) -> None:
        """Encode or read a video, and ask all questions about it."""
        args, engine, several = self._args, self._engine, len(self._args.question) > 1
        assert video.source is not None  # by `_open_video`
        conversation = Conversation(engine.model, engine.processor, [video.source], **args.encoding())
        try:  # a question that is too long is found before the video is encoded
            prompts = [
                engine.settled(partial(conversation.question, question, args.max_new_tokens))
                for question in args.question
            ]
            engine.settled(partial(self._encode, video, conversation))
        except JobError as fault:
            self._fail(fault)
            return
        encoded = conversation.encoded
        assert encoded is not None  # by `_encode`
        self._frames += encoded.frames
        self._parts.update(encoded.seconds)
        self._visual_tokens += encoded.visual_tokens
        if len(self._videos) > 1 and self._shown and args.question:
            say(f"== {video.name} ==\n")
        options: dict[str, Any] = {"on_text": say if self._shown else None}
        options["evidence"] = args.evidence or (0 if args.evidence_html is None else MOMENTS)
        evidence: list[tuple[str, Evidence]] = []
        for question, prompt in zip(args.question, prompts, strict=True):
            if several and self._shown:
                say(f"> {question}\n")
            try:
                answer = engine.computed(partial(conversation.answer, prompt, args.sampling(), **options))
            except JobError as error:
                if not isinstance(error.cause, NonFiniteLogitsError):
                    error.raise_cause()
                self._answers.append((video.name, question, error.cause))
                if self._shown and (several or len(self._videos) > 1):
                    note(f"error: {error}")
                continue
            self._answers.append((video.name, question, answer))
            if self._shown:
                say("\n")
            if answer.evidence is not None:
                evidence.append((question, answer.evidence))
                if self._shown and args.evidence:
                    note(answer.evidence.describe())

        def write_page() -> None:
            if self._shown and evidence:
                facts = str(video.page), evidence, conversation.sources
                write_evidence_page(*facts, name=video.name, model=args.model)
                self._pages.append(index_entry(video.name, *facts))

        if video.page is not None:
            agree(self._comm, "evidence page", write_page)

    def _encode(self, video: _Video, conversation: Conversation) -> None:
        """Encode a video and save its features, or read them."""
        args, comm, engine = self._args, self._comm, self._engine
        if video.store is not None:
            place: dict[str, Any] = {"device": engine.device, "dtype": next(engine.model.parameters()).dtype}
            place["mapped"] = args.visual_offload is not None
            with self._times.measure("read features"):
                load = partial(load_video, video.store, engine.chat_format, comm, **place)
                conversation.encoded = agree(comm, "features", load)
            return
        with self._times.measure(ENCODE_STAGE), FramesBar(args.progress and self._shown) as bar:
            conversation.encode(bar)
        if video.save_to is not None and conversation.encoded is not None:
            with self._times.measure("save"):
                save_video(video.save_to, conversation.encoded, comm, video.feature_meta)

    def _fail(self, fault: JobError) -> None:
        """Report a video that cannot be used; raise the error if there is no other one, or if it is not the video's."""
        if len(self._videos) == 1 or not fault.of_the_input or isinstance(fault.cause, NonFiniteLogitsError):
            fault.raise_cause()
        self._faults.append(first_line(fault))
        if self._shown:
            note(f"error: {self._faults[-1]}")

    def report(self) -> None:
        """Write the index of the pages, the report, and to stderr the times and memory of all ranks."""
        agree(self._comm, "evidence index", self._write_index)
        patch = patch_of(self._engine.model)
        sent = patch.context.comm.bytes.total if patch else 0
        microseconds = [round(1e6 * self._parts[part]) for part in PARTS]
        facts = [round(peak_memory(self._device) * 1024), sent, self._visual_tokens, *microseconds]
        rows = self._comm.gather_ints(facts)
        if not self._shown:
            return
        parts = [{part: value / 1e6 for part, value in zip(PARTS, row[3:], strict=True)} for row in rows]
        values: dict[str, Any] = {
            "frames": self._frames,  # of all videos
            "visual_tokens": sum(row[2] for row in rows),
            "ranks": self._comm.size,
            "seconds": {name: round(seconds, 4) for name, seconds in self._times.seconds().items()},
            "answers": [],
            "peak_memory_mib": [round(row[0] / 1024, 1) for row in rows],  # allocated on a GPU, resident on a CPU
            "bytes_sent": [row[1] for row in rows],  # to other ranks
            "device": self._device.type,
            "encoding_seconds": parts if any(self._parts.values()) else [],  # of each of `PARTS`, which overlap
        }
        answers = [answer for *_, answer in self._answers if isinstance(answer, Answer)]
        note(_summary(values, answers))
        if self._args.report:
            for video, question, answer in self._answers:
                row: dict[str, Any] = {"video": video, "question": question}
                if isinstance(answer, Answer):  # without the attention of each token
                    row |= asdict(replace(answer, evidence=None)) | evidence_values(answer.evidence)
                else:
                    row["error"] = str(answer)
                values["answers"].append(row)
            values["seconds"]["prefill"] = round(sum(answer.prefill_seconds for answer in answers), 4)
            values["seconds"]["generate"] = round(sum(answer.decode_seconds for answer in answers), 4)
            write_text(self._args.report, json.dumps(values, indent=1, allow_nan=False) + "\n")

    def _write_index(self) -> None:
        """Write the index of the evidence pages if there are several videos, and print what was written."""
        path, several = self._args.evidence_html, len(self._videos) > 1
        if path is None or not self._pages:
            return
        if several:
            write_evidence_index(path, self._pages, self._faults, self._args.model)
        note(f"evidence page: {path}" + (f", the index of {len(self._pages)} pages" if several else ""))

    def report_faults(self) -> int:
        """Report the videos and questions without an answer; return their number, or raise if no other has one."""
        failed = [str(answer) for *_, answer in self._answers if not isinstance(answer, Answer)]
        for faults, count, what, kind in (
            (self._faults, len(self._videos), "videos cannot be used", VideoError),
            (failed, len(self._answers), "questions have no answer", NonFiniteLogitsError),
        ):
            if faults:
                text = f"{len(faults)} of {count} {what}; the first: {faults[0]}"
                if len(faults) == count:
                    agree(self._comm, what, error=kind(text))
                if self._shown:
                    note(f"error: {text}")
        return len(self._faults) + len(failed)


def _videos(args: AskOptions, *, create: bool) -> list[_Video]:
    """Return the videos of a run, with the paths of their outputs.

    Args:
        create: create the output files and directories now, so that errors do not occur after a long encoding.
    """
    videos: list[_Video] = []
    if args.features is not None:
        stores = sorted(str(path.parent) for path in Path(args.features).glob(f"*/{FeatureStore.INDEX}"))
        if not stores or Path(args.features, FeatureStore.INDEX).exists():  # without any, opening it raises an error
            stores = [args.features]
        if len(stores) > 1 and args.video:
            raise ConfigError(
                f"--features {args.features} has the features of {len(stores)} videos; give one of its directories to "
                "compare with --video"
            )
        videos = [_Video(video=next(iter(args.video), None), features=store) for store in stores]
    else:
        for name in args.video:
            files = [name]
            if os.path.isdir(name):
                files = sorted(str(path) for path in Path(name).iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
            if not files:
                suffixes = ", ".join(sorted(VIDEO_SUFFIXES))
                raise ConfigError(f"--video {name}: no video in this directory (by the names {suffixes})")
            videos += [_Video(video=file) for file in files]
    if create and args.save_features is not None:
        require_writable_directory("save_features", args.save_features)
    for option in ("report", "evidence_html") if create else ():
        path = getattr(args, option)
        if path is not None:
            with writing(f"--{option} {path}", "", "choose another path", ConfigError):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            require_writable(option, path)
    if len(videos) == 1:
        return [replace(videos[0], save_to=args.save_features, page=args.evidence_html)]
    used: Counter[str] = Counter()
    for number, video in enumerate(videos):  # each has its own feature directory and page
        name = os.path.basename(video.name)
        used[name] += 1
        label = name if used[name] == 1 else f"{name}-{used[name]}"
        save_to = args.save_features and os.path.join(args.save_features, label)
        page = args.evidence_html
        if page is not None:
            page = str(Path(page).with_stem(f"{Path(page).stem}-{label}"))
        videos[number] = replace(video, save_to=save_to, page=page)
    return videos


def _summary(values: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    """Return the line that a run prints at its end."""
    stages = []
    for name, seconds in values["seconds"].items():
        rate = ""
        if name == ENCODE_STAGE and seconds > 0:
            rows = values["encoding_seconds"]  # the rank that needed most time for a part is reported
            most = [f"{part} {max(row[part] for row in rows):.2f} s" for part in (rows[0] if rows else ())]
            rate = f" ({values['frames'] / seconds:.1f} frames/s{'; ' * bool(most)}{', '.join(most)})"
        stages.append(f"{name} {seconds:.2f} s{rate}")
    if answers:
        decode_seconds = sum(a.decode_seconds for a in answers)
        decoded = sum(len(a.tokens) - 1 for a in answers)  # prefill computes the first token of each answer
        rate = f" at {decoded / decode_seconds:.1f} tokens/s" if decode_seconds > 0 else ""
        stages.append(f"prefill {sum(a.prefill_seconds for a in answers):.2f} s")
        stages.append(f"decode {sum(len(a.tokens) for a in answers)} tokens{rate}")
    ranks = "1 rank" if values["ranks"] == 1 else f"{values['ranks']} ranks"
    kind = "allocated" if values["device"] == "cuda" else "resident"
    memory = ", ".join(f"{mib:.0f}" for mib in values["peak_memory_mib"])
    return (
        f"{values['frames']} frames, {values['visual_tokens']} visual tokens on {ranks}; {', '.join(stages)}; "
        f"peak memory by rank ({kind}) {memory} MiB"
    )
