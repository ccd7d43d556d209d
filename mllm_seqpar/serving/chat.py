"""`mllm-seqpar chat`: a conversation about a video in the terminal.

    mllm-seqpar chat --model DIR --video movie.mp4 --num_processes 4

Earlier turns stay in the KV cache, and the frames on the ranks that encoded them; a question computes only its
own tokens.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.cli.launch import own_ranks, started_by_launcher
from mllm_seqpar.cli.options import option, parse_options
from mllm_seqpar.cli.progress import FramesBar, note, quiet_transformers, say
from mllm_seqpar.errors import ConfigError, SeqParError
from mllm_seqpar.inference.arguments import SEED, ServingOptions
from mllm_seqpar.inference.encoding import Interrupted
from mllm_seqpar.inference.evidence import MOMENTS
from mllm_seqpar.inference.job import Job, JobError
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES, FrameChoice

from .jobs import Worker, joined_worker
from .line_editing import edit_lines, terminal_restorer

SIGNAL_POLL = 0.2
"""Seconds after which a Ctrl-C that did not interrupt the wait for a key is handled."""

COMMANDS = """\
/video PATH   begin a new conversation about this video
/add PATH     show this further video with the next question
/frames       print which frames of the video are used
/frames N     use N frames, evenly spaced, and begin a new conversation
/clip S E     use the part from second S to second E, and begin a new conversation; /clip: the whole video
/reset        begin a new conversation about the same video
/evidence     print the moments of the video that the last answer attends to most
/help         this list
/exit         end the chat, as Ctrl-D does
Tab completes commands and paths. The arrow keys bring back earlier lines, also of earlier chats.
Ctrl-C stops an answer."""
_NAMES = tuple(sorted({line.split()[0] for line in COMMANDS.splitlines() if line.startswith("/")}))


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ServingOptions):
    """The options of a chat."""

    seed: int = option(**SEED)
    video: str | None = option("the video to talk about; /video PATH chooses another", None)
    start: float | None = option("begin --video at this time, in seconds", None, least=0)
    end: float | None = option("end --video before this time, in seconds", None, above=0)
    system: str | None = option("a text that precedes the conversation, for models that were trained with one", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_sampling()
        for name in ("start", "end") if self.video is None else ():
            self._refuse_unused(name, "it belongs to --video")


def chat(argv: Sequence[str]) -> None:
    """Hold the conversation with the user of the terminal until the end of the input. The ranks that `own_ranks` starts
    call this too.

    Raises:
        SeqParError: on invalid options, or a model or video that cannot be read.
    """
    quiet_transformers()
    args = parse_options(
        ChatOptions,
        argv,
        prog="mllm-seqpar chat",
        description="Talk about a video in the terminal.",
        example="mllm-seqpar chat --model DIR --video movie.mp4 --num_processes 4",
    )
    if started_by_launcher():
        raise ConfigError(
            "chat: a launcher started this process, and launchers do not pass on the keyboard and Ctrl-C; start "
            "it as mllm-seqpar chat --num_processes N"
        )
    media = _open_video(args, args.video) if args.video is not None else None
    with own_ranks(args.num_processes, f"{__name__}:chat", argv, before_exit=terminal_restorer()):
        with joined_worker(args, keep=1) as worker:
            if worker.engine.comm.rank:
                worker.follow()
            else:
                Terminal(args, worker, media).talk()


class Terminal:
    """The conversation with the user, on rank 0."""

    def __init__(self, args: ChatOptions, worker: Worker, video: Clip | None) -> None:
        self._args, self._worker, self._video = args, worker, video
        self._stop = self._reading = False
        self._reset()

    def talk(self) -> None:
        """Read lines until the end of the input."""
        ranks, keep = self._worker.engine.comm.size, edit_lines(_NAMES)
        with self._interrupts():
            note(f"{self._args.model} on {ranks} rank{'s' * (ranks > 1)}; /help lists the commands")
            if self._video is not None:
                self._describe_frames()
            while (line := self._read_line()) is not None and line.partition(" ")[0] not in ("/exit", "/quit"):
                keep()
                try:
                    if line.startswith("/"):
                        name, _, rest = line.partition(" ")
                        self._command(name, rest.strip())
                    elif line:
                        self._ask(line)
                except (SeqParError, JobError) as error:
                    note(f"error: {error}")

    def _read_line(self) -> str | None:
        """Return the next line, empty after Ctrl-C; None at the end of the input."""
        self._stop = False
        try:
            try:
                self._reading = True
                signal.setitimer(signal.ITIMER_REAL, SIGNAL_POLL, SIGNAL_POLL)
                return input("> " if sys.stdin.isatty() else "").strip()
            finally:
                self._reading = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("\n/exit or Ctrl-D ends the chat")
            return ""

    def _command(self, name: str, value: str) -> None:
        if name == "/help":
            note(COMMANDS)
        elif name == "/reset":
            self._reset()
            note("a new conversation begins")
        elif name == "/evidence":
            note(self._evidence)
        elif name in ("/video", "/add") and value:
            video = _open_video(replace(self._args, start=None, end=None), value)
            if name == "/video" or self._video is None:
                self._show(video)
            else:
                self._describe_frames(video)
                self._further.append(video)
        elif name not in ("/frames", "/clip"):
            raise ConfigError(f"{name}: there is no such command, or its argument is missing\n{COMMANDS}")
        elif self._video is None:
            raise ConfigError("no video yet: /video PATH chooses one")
        elif name == "/clip":
            self._show(replace(self._video, frames=_clip(value, self._video.frames)))
        elif not value:
            self._describe_frames()
        elif value.isdigit() and int(value):
            frames = replace(self._video.frames, fps=None, max_frames=None, num_frames=int(value))
            self._show(replace(self._video, frames=frames))
        else:
            raise ConfigError(f"/frames {value}: give a number above 0")

    def _show(self, video: Clip) -> None:
        """Begin a conversation about a video; raise VideoError if it does not have these frames."""
        video.open(self._worker.engine.chat_format)
        self._video = video
        self._reset()
        self._describe_frames()

    def _reset(self) -> None:
        system, self._further, self._shown = self._args.system, list[Clip](), 0
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._evidence = "no answer about a video yet"

    def _describe_frames(self, video: Clip | None = None) -> None:
        video = video or self._video
        assert video is not None
        source = video.open(self._worker.engine.chat_format)
        count = len(source)
        first, last = (source.seconds(number) or 0.0 for number in (0, count - 1))
        note(f"{video.source}: {count} frames, from {first:.2f} s to {last:.2f} s")

    def _ask(self, question: str) -> None:
        """Answer a question and add both to the conversation; without an answer, the question is forgotten."""
        video = () if self._video is None else (self._video, *self._further)
        content = [*({"type": "video"} for _ in video[self._shown :]), {"type": "text", "text": question}]
        messages = [*self._messages, {"role": "user", "content": content}]
        sampling = self._args.sampling()
        with FramesBar() as progress:
            try:
                job = Job(messages=messages, media=video, sampling=sampling, evidence=MOMENTS)
                reply = self._worker.run(
                    job, progress=progress, on_start=progress.close, on_text=say, interrupted=lambda: self._stop
                )
            except JobError as error:
                if not isinstance(error.cause, Interrupted):
                    raise
                note("\nstopped")
                return
        say("\n")
        if reply.evidence is not None:
            self._evidence = "\n".join(map(str, reply.evidence.moments)) or reply.evidence.note
        if reply.finish_reason != "stop":
            limit = f"the answer has --max_new_tokens {sampling.max_new_tokens} tokens and was cut off"
            note("stopped" if reply.finish_reason == "interrupted" else limit)
        if reply.text or reply.finish_reason != "interrupted":
            self._messages, self._shown = [*messages, {"role": "assistant", "content": reply.text}], len(video)

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop the answer after the running pass, or drop the line that is typed, but never end the chat.

        Python installs no handler if SIGINT is ignored at its start, as in background jobs of shells.

        `input` runs handlers only when a signal interrupts its wait for a key. A signal that arrives just before the
        wait, or in another thread, would be handled only at the next key or signal, so an alarm interrupts the wait
        regularly.
        """

        def interrupt(number: int, frame: Any) -> None:
            self._stop = True
            if self._reading:
                self._reading = False
                raise KeyboardInterrupt

        handlers = {signal.SIGINT: interrupt, signal.SIGALRM: lambda number, frame: None}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _open_video(args: ChatOptions, name: str) -> Clip:
    path = os.path.expanduser(name.strip("'\""))
    clip = Clip.of_file("video", path, args.frame_choice().over(DEFAULT_FRAMES))
    clip.open()  # raises if it is not a video, before a model is loaded
    return clip


def _clip(value: str, frames: FrameChoice) -> FrameChoice:
    """Return the frames with the clip that /clip gives; without times, of the whole video."""
    if not value:
        return replace(frames, start=None, end=None)
    try:
        start, end = map(float, value.split())
    except ValueError as error:
        raise ConfigError(f"/clip {value}: give two times in seconds, such as /clip 60 90, or none") from error
    try:
        return replace(frames, start=start, end=end)
    except ConfigError as error:
        raise ConfigError(f"/clip {value}: {error}") from error
