"""Models for lmms-eval, whose ranks share each video.

    accelerate launch --num_processes 8 -m lmms_eval --model mllm_seqpar --model_args pretrained=DIR,sp=4,fps=1 \\
        --tasks videomme --batch_size 1

lmms-eval gives each process a part of the documents. Here, the ranks of a group combine their parts and answer all of
them, one after another, so that each group acts as one rank of lmms-eval with the documents of all its ranks. The
collectives of lmms-eval do not change. The padding requests that make all parts equal in length are not answered.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms

from mllm_seqpar.cli.launch import use_cuda
from mllm_seqpar.cli.progress import progress_bar
from mllm_seqpar.comm import transfer_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.chat_format import media_parts
from mllm_seqpar.data.downloads import store_bytes
from mllm_seqpar.data.frame_choice import DEFAULT_FRAMES
from mllm_seqpar.data.media_files import IMAGE_SUFFIXES
from mllm_seqpar.data.sources import FrameSource, VideoSource
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_processor, model_digest

from .arguments import InferenceOptions
from .choices import continuation
from .conversation import Conversation
from .generation import Sampling
from .model_loading import load_patched
from .rank_groups import divide_ranks

_UNSUPPORTED_REQUEST = "lmms-eval's requests of the kind {} are not supported by this model; choose other tasks"

_OF_REQUESTS = {"max_new_tokens", "temperature", "top_p"}
"""Options that the requests state instead (`generation_kwargs`)."""

_NEUTRAL = {"num_beams": 1, "top_k": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
"""Settings of transformers' `generate` that are not supported, with the values that have no effect."""


@dataclass(frozen=True)
class _Request:
    """A prompt, and either how to answer it or the text whose likelihood is asked for; the same on all ranks."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    target: str | None = None

    @property
    def media(self) -> str:
        """A key that is equal for equal videos and images."""
        return json.dumps(media_parts(self.messages))


class SimpleSeqParModel(lmms):
    """A model of this package for lmms-eval's tasks that pass a text and a list of videos and images.

    Args:
        pretrained: directory or id of the model.
        system_prompt: a text that precedes each prompt.
        batch_size, max_batch_size: accepted and not used; requests are answered one after another.
        device: lmms-eval's device, such as cuda:0; only its type is used.
        options: the options of `mllm-seqpar ask`: fps, num_frames, max_frames, sp, dtype, strategy, ...
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        system_prompt: str | None = None,
        batch_size: Any = 1,
        max_batch_size: Any = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        known = {field.name for field in dataclasses.fields(InferenceOptions)} - _OF_REQUESTS
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"--model_args: {unknown[0]!r} is unknown; choose from {', '.join(sorted(known))}")
        kind = (device or "auto").partition(":")[0]
        self.options = InferenceOptions(**{"device": kind, **options}, model=pretrained)
        cuda, world = use_cuda(self.options.device), transfer_communicator(None)
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        ranks = divide_ranks(world, self.options.sp, self.options.timeout)
        self.processor, _ = agree(
            world,
            "model",
            lambda: (load_processor(pretrained), model_digest(pretrained)),
            lambda found: {"model": found[1], "options": options},
        )
        self._family, self._group = chat_family(self.processor), ranks.group
        self._model: Any = load_patched(self.options, self._family, ranks.group, self.device)
        self._rank, self._world_size = world.rank, world.size
        self._system = system_prompt
        self._conversation: tuple[str, Conversation | None] = ("", None)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the answer to each request."""
        return self._answered(requests, self._generation_request, self._generated, "")

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """Return for each request (negative log-likelihood per token, whether decoding would choose these tokens).

        lmms-eval takes the smallest first number as the model's choice. The pair is wrapped, because lmms-eval 0.7
        turns a plain pair into a text, which its metrics then cannot read.
        """
        pairs = self._answered(requests, self._likelihood_request, self._scored, (0.0, False))
        return [GenerationResult(text=pair) for pair in pairs]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise ConfigError(_UNSUPPORTED_REQUEST.format("generate_until_multi_round"))

    def clean(self) -> None:
        """Free the memory of the model; lmms-eval calls this after the last request."""
        self._conversation, self._model = ("", None), None
        super().clean()

    def _answered(
        self, requests: Sequence[Instance], read: Callable[[Instance], _Request], answer: Any, padding: Any
    ) -> list[Any]:
        """Answer the requests of all ranks of the group, grouped by their media; return the answers to this rank's."""
        wanted = [not (request.metadata or {}).get("__padding_only__") for request in requests]
        mine = agree(
            self._group, "requests", lambda: [read(r) for r, real in zip(requests, wanted, strict=True) if real]
        )
        texts = self._group.gather_texts(json.dumps(self._with_seeds(mine)))
        rows = [[_Request(**values) for values in json.loads(text)] for text in texts]
        keyed = [(request.media, rank, number) for rank, row in enumerate(rows) for number, request in enumerate(row)]
        found: dict[tuple[int, int], Any] = {}
        with progress_bar(len(keyed), "request", "answering", self._rank == 0) as bar:
            for _, rank, number in sorted(keyed, key=lambda item: item[0]):
                found[rank, number] = answer(rows[rank][number])
                bar.update()
        own = iter(found[self._group.rank, number] for number in range(len(mine)))
        return [next(own) if real else padding for real in wanted]

    def _with_seeds(self, requests: Sequence[_Request]) -> list[dict[str, Any]]:
        """Return the requests as JSON; a request that is repeated to sample several answers gets several seeds."""
        seen: Counter[str] = Counter()
        rows = [dataclasses.asdict(request) for request in requests]
        for row in rows:
            key = json.dumps(row)
            if "temperature" in (row["sampling"] or {}):
                row["sampling"]["seed"] = self.options.seed + seen[key]
            seen[key] += 1
        return rows

    def _generated(self, request: _Request) -> str:
        sampling = Sampling(**(request.sampling or {}))
        conversation, prompt = self._prompt(request, sampling.max_new_tokens)
        return conversation.answer(prompt, sampling, stop=tuple(request.stop)).text

    def _scored(self, request: _Request) -> tuple[float, bool]:
        tokenizer, target = self.processor.tokenizer, request.target
        if not target:
            raise DataError("a request asks for the likelihood of an empty text; check doc_to_target of the task")
        conversation, prompt = self._prompt(request, 1)
        tokens = continuation(tokenizer, prompt.input_ids[0].tolist(), target)
        tokens = tokens or tokenizer.encode(target, add_special_tokens=False)
        (score,) = conversation.log_likelihoods(prompt, [tokens])
        return -score.log_likelihood / len(tokens), score.is_greedy

    def _prompt(self, request: _Request, limit: int) -> tuple[Conversation, Any]:
        key, conversation = self._conversation
        if conversation is None or key != request.media:
            self._conversation = ("", None)  # before the next one takes memory
            del conversation
            conversation = self._encoded(request)
            self._conversation = (request.media, conversation)
        prompt = agree(self._group, "prompt", lambda: conversation.prompt(request.messages, limit))
        return conversation, prompt

    def _encoded(self, request: _Request) -> Conversation:
        parts = media_parts(request.messages)
        conversation = Conversation.open(
            self._model, self.processor, lambda: [self._source(part) for part in parts], **self.options.encoding()
        )
        conversation.encode()
        return conversation

    def _source(self, part: Mapping[str, Any]) -> FrameSource:
        if part["type"] == "image":
            return self._family.image_source(part["path"])
        frames = self.options.frame_choice().over(DEFAULT_FRAMES)
        return VideoSource.open(part["path"], **vars(frames), **self.options.decoding())

    def _generation_request(self, request: Instance) -> _Request:
        context, arguments, visuals, doc_id, task, split = request.args
        return _generation(self._messages(context, visuals, self.task_dict[task][split][doc_id]), arguments)

    def _likelihood_request(self, request: Instance) -> _Request:
        context, target, visuals, doc_id, task, split = request.args
        document = self.task_dict[task][split][doc_id]
        text = target(document) if callable(target) else target
        return _Request(self._messages(context, visuals, document), target=str(text))

    def _messages(self, context: str, visuals: Any, document: Any) -> list[dict[str, Any]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        media = [] if visuals is None else [_medium(item) for item in visuals(document) or ()]
        return [*system, {"role": "user", "content": [*media, {"type": "text", "text": context}]}]


class ChatSeqParModel(SimpleSeqParModel):
    """A model of this package for lmms-eval's tasks that pass messages, or can be converted to messages."""

    is_simple = False

    def _generation_request(self, request: Instance) -> _Request:
        _, to_messages, arguments, doc_id, task, split = request.args
        messages = [
            {"role": message["role"], "content": [_part(part) for part in message["content"]]}
            for message in to_messages(self.task_dict[task][split][doc_id])
        ]
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return _generation(messages, arguments)


def _generation(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> _Request:
    """Return a request with the sampling and the stop strings of lmms-eval's `generation_kwargs`."""
    temperature = arguments.get("temperature") or 0.0
    sampled = arguments.get("do_sample", temperature > 0) and temperature > 0
    for name, neutral in _NEUTRAL.items():
        value = arguments.get(name)
        if value not in (None, neutral) and (sampled or name != "top_k"):  # without sampling, top_k has no effect
            raise ConfigError(
                f"generation_kwargs: {name} = {value!r} is not supported; leave it out, or give {neutral} "
                f"(--gen_kwargs {name}={neutral})"
            )
    sampling: dict[str, Any] = {"max_new_tokens": arguments.get("max_new_tokens", 128)}
    if sampled:
        sampling |= {"temperature": temperature, "top_p": arguments.get("top_p") or 1.0}
    until = arguments.get("until") or ()
    return _Request(messages, sampling, (until,) if isinstance(until, str) else tuple(until))


def _part(part: Any) -> dict[str, Any]:
    """Return a part of a message in the form of this package."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part.get("start_time") is not None or part.get("end_time") is not None:
        raise DataError(
            "a message shows a part of a video (start_time, end_time), which is not supported; cut the file"
        )
    return _medium(part["url"])


def _medium(value: Any) -> dict[str, Any]:
    """Return the part of a video or image: a path, or a Pillow image, which is written to the media cache."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        return {"type": "image" if os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES else "video", "path": path}
    if not hasattr(value, "convert"):
        raise DataError(
            f"a task shows {type(value).__name__} {value!r:.60}; this model takes videos and images; "
            "choose another task"
        )
    content = io.BytesIO()
    value.convert("RGB").save(content, "PNG")
    return {"type": "image", "path": str(store_bytes(content.getvalue(), ".png"))}
