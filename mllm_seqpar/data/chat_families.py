"""Model families as the two scripts see them: how chats and frames become inputs, one file per family.

A family is chosen by the processor of a model directory; everything else asks the family, so that the loops that train
and answer know of none. Each of them gives what the family's own processor gives for the same chat with those pictures;
the tests compare with that processor.
"""

from typing import Any

from mllm_seqpar.patches.idefics.chat import IdeficsChats
from mllm_seqpar.patches.mllama.chat import MllamaChats
from mllm_seqpar.patches.mplug_owl3.chat import NativeChats
from mllm_seqpar.patches.open_flamingo.chat import OpenFlamingoChats

from .chat_family import ChatFamily, ChatText

FAMILIES: dict[str, type[ChatFamily]] = {
    "MPlugOwl3Processor": NativeChats,
    "IdeficsProcessor": IdeficsChats,
    "MllamaProcessor": MllamaChats,
    "OpenFlamingoProcessor": OpenFlamingoChats,
}
"""By the name of the processor's class: importing the classes would import what a run may not need."""


def chat_family(processor: Any) -> ChatFamily:
    """The family of a processor; one of an unknown class must be able to do what a native one does."""
    kind = next((FAMILIES[c.__name__] for c in type(processor).__mro__ if c.__name__ in FAMILIES), NativeChats)
    return kind(processor)


__all__ = ["FAMILIES", "ChatFamily", "ChatText", "chat_family"]
