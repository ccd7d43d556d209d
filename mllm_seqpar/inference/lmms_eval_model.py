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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms

from mllm_seqpar.chats.chat import Allowed, Chat, Turn
from mllm_seqpar.chats.chat_family import ChatText
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.chats.forms import plain_message
from mllm_seqpar.cli.launch import use_cuda
from mllm_seqpar.cli.progress import progress_bar
from mllm_seqpar.comm import transfer_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES
from mllm_seqpar.videos.media_files import IMAGE_SUFFIXES, media_cache

from .arguments import InferenceOptions
from .choices import continuation
from .conversation import Conversation
from .engine import Engine
from .generation import Sampling
from .job import Job, JobError

_UNSUPPORTED_REQUEST = "lmms-eval's requests of the kind {} are not supported by this model; choose other tasks"

_STATED_ELSEWHERE = {"model", "max_new_tokens", "temperature", "top_p"}
"""Options that `pretrained` and the requests (`generation_kwargs`) state instead."""

_NEUTRAL = {"num_beams": 1, "top_k": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
"""Settings of transformers' `generate` that are not supported, with the values that have no effect."""


_PARTS = Allowed(sources={"image": ("path",), "video": ("path",)})


@dataclass(frozen=True, kw_only=True)
class _Request(Job):
    """A job, or the text `target` whose likelihood as its answer is asked for."""

    target: str | None = None


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
        world, given = transfer_communicator(None), {"device": (device or "auto").partition(":")[0], **options}
        self.options = agree(world, "--model_args", lambda: _options(pretrained, given), lambda _: {"options": options})
        cuda = use_cuda(self.options.device)
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        self._engine: Any = Engine(self.options, world, self.device)
        self._engine.load()
        self._rank, self._world_size = world.rank, world.size
        self._system = system_prompt

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the answer to each request."""
        return self._answered(requests, self._generation_request, "")

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """Return for each request (negative log-likelihood per token, whether decoding would choose these tokens).

        lmms-eval takes the smallest first number as the model's choice. The pair is wrapped, because lmms-eval 0.7
        turns a plain pair into a text, which its metrics then cannot read.
        """
        pairs = self._answered(requests, self._likelihood_request, (0.0, False))
        return [GenerationResult(text=pair) for pair in pairs]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise ConfigError(_UNSUPPORTED_REQUEST.format("generate_until_multi_round"))

    def clean(self) -> None:
        """Free the memory of the model; lmms-eval calls this after the last request."""
        self._engine = None
        super().clean()

    def _answered(self, requests: Sequence[Instance], read: Callable[[Instance], _Request], padding: Any) -> list[Any]:
        """Answer the requests of all ranks of the group, grouped by their media; return the answers to this rank's."""
        group, seen = self._engine.comm, Counter[str]()
        places = [number for number, x in enumerate(requests) if not (x.metadata or {}).get("__padding_only__")]
        mine = agree(group, "requests", lambda: [read(requests[place]) for place in places])
        for number, request in enumerate(mine):  # one that is repeated to sample several answers gets several seeds
            key = request.to_json()
            seeded = replace(request.sampling, seed=self.options.seed + seen[key])
            mine[number] = replace(request, sampling=seeded)
            seen[key] += 1
        texts = group.gather_texts(json.dumps([request.to_json() for request in mine]))
        rows = [[_Request.from_json(text) for text in json.loads(row)] for row in texts]
        keyed = [(str(r.media), rank, number) for rank, row in enumerate(rows) for number, r in enumerate(row)]
        answers = [padding] * len(requests)
        with progress_bar(len(keyed), "request", "answering", self._rank == 0) as bar:
            for _, rank, number in sorted(keyed, key=lambda item: item[0]):
                answer = self._answer_one(rows[rank][number])
                if rank == group.rank:
                    answers[places[number]] = answer
                bar.update()
        return answers

    def _answer_one(self, request: _Request) -> str | tuple[float, bool]:
        """Answer a request on all ranks. Only the engine refers to its conversation afterwards, and can free it."""
        try:
            conversation, prompt = self._engine.begin(request)
            return self._engine.computed(partial(_answer, request, conversation, prompt))
        except JobError as error:
            error.raise_cause()

    def _generation_request(self, request: Instance) -> _Request:
        context, arguments, visuals, doc_id, task, split = request.args
        chat = self._chat(context, visuals, self.task_dict[task][split][doc_id])
        return self._request(chat, **_generation(arguments))

    def _likelihood_request(self, request: Instance) -> _Request:
        context, target, visuals, doc_id, task, split = request.args
        document = self.task_dict[task][split][doc_id]
        text = target(document) if callable(target) else target
        sampling = Sampling(max_new_tokens=1)
        return self._request(self._chat(context, visuals, document), sampling=sampling, target=str(text))

    def _request(self, chat: Chat, **options: Any) -> _Request:
        choice = self.options.frame_choice()
        clips = (replace(clip, frames=choice.over(clip.frames).over(DEFAULT_FRAMES)) for clip in chat.media)
        return _Request(messages=chat.to_json(), media=tuple(clips), **options)

    def _chat(self, context: str, visuals: Any, document: Any) -> Chat:
        system = [] if self._system is None else [Turn("system", self._system)]
        media = [] if visuals is None else [_medium(item) for item in visuals(document) or ()]
        return Chat((*system, Turn("user", (*media, context))))


class ChatSeqParModel(SimpleSeqParModel):
    """A model of this package for lmms-eval's tasks that pass messages, or can be converted to messages."""

    is_simple = False

    def _generation_request(self, request: Instance) -> _Request:
        _, to_messages, arguments, doc_id, task, split = request.args
        messages = to_messages(self.task_dict[task][split][doc_id])
        chat = Chat.parse([plain_message(message) for message in messages], _PARTS)
        chat = chat.with_media(replace(_medium(medium.source), frames=medium.frames) for medium in chat.media)
        if self._system is not None and chat.turns[0].role != "system":
            chat = Chat((Turn("system", self._system), *chat.turns))
        return self._request(chat, **_generation(arguments))


def _answer(request: _Request, conversation: Conversation, prompt: ChatText) -> str | tuple[float, bool]:
    """Return the answer, or (negative log-likelihood per token, whether decoding would choose them) of the target."""
    if request.target is None:
        return conversation.answer(prompt, request.sampling, stop=request.stop).text
    if not request.target:
        raise DataError("a request asks for the likelihood of an empty text; check doc_to_target of the task")
    tokens = continuation(conversation.tokenizer, prompt.input_ids[0].tolist(), request.target)
    tokens = tokens or conversation.tokenizer.encode(request.target, add_special_tokens=False)
    (score,) = conversation.log_likelihoods(prompt, [tokens])
    return -score.log_likelihood / len(tokens), score.is_greedy


def _options(pretrained: str, given: dict[str, Any]) -> InferenceOptions:
    known = {field.name for field in dataclasses.fields(InferenceOptions)} - _STATED_ELSEWHERE
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"--model_args: {unknown[0]!r} is unknown; choose from {', '.join(sorted(known))}")
    return InferenceOptions(**given, model=pretrained)


def _generation(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling and the stop strings of lmms-eval's `generation_kwargs`, as arguments of `Job`."""
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
    stop = (until,) if isinstance(until, str) else tuple(until)
    return {"sampling": Sampling(**sampling), "stop": stop}


def _medium(value: Any) -> Clip:
    """Return a video or image: a path, or a Pillow image, which is written to the media cache."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        return Clip("image" if os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES else "video", path)
    if not hasattr(value, "convert"):
        raise DataError(
            f"a task shows {type(value).__name__} {value!r:.60}; this model takes videos and images; "
            "choose another task"
        )
    content = io.BytesIO()
    value.convert("RGB").save(content, "PNG")
    return Clip("image", str(media_cache().store(content.getvalue(), ".png")))
