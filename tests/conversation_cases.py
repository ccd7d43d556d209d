"""Conversations in one process, which those on several ranks and through a program must equal."""

from pathlib import Path
from typing import Any

from mllm_seqpar import patch_model
from mllm_seqpar.data import VideoSource
from mllm_seqpar.inference import Answer, Sampling
from mllm_seqpar.inference.conversation import Conversation
from mllm_seqpar.models.loading import load_processor
from model_copies import load_model


def replies_in_one_process(
    model: Path, video: Path, questions: tuple[str, ...], frames: int, tokens: int, **clip: float
) -> list[Answer]:
    """Return the replies to questions that are asked one after another; `clip` has the start and end of the video."""
    patched = patch_model(load_model(str(model)).eval())
    source = VideoSource.open(video, num_frames=frames, **clip)
    conversation, messages, replies = Conversation(patched, load_processor(str(model)), [source]), [], []
    for question in questions:
        media: list[Any] = [] if messages else [{"type": "video"}]
        messages.append({"role": "user", "content": [*media, {"type": "text", "text": question}]})
        replies.append(conversation.answer(conversation.prompt(messages), Sampling(max_new_tokens=tokens)))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


def reply_in_one_process(model: Path, messages: list[Any], sources: list[Any], tokens: int) -> Answer:
    """Return the reply to all messages in one prompt; a part of another type than text stands for a video."""
    shown = [
        {**message, "content": [x if x["type"] == "text" else {"type": "video"} for x in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    conversation = Conversation(patch_model(load_model(str(model)).eval()), load_processor(str(model)), sources)
    return conversation.answer(conversation.prompt(shown), Sampling(max_new_tokens=tokens))
