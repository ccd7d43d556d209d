"""The supported model families, and the one index that lists them.

The folder `patches/` is installed as `mllm_seqpar.patches`. A family is a module with a class (`Family`) that has its
sites, visibility and forward; a module of `chats/` with its chat format; a function of `sizes.py`; an entry in
`FAMILIES`; and four lines in `README.md`: the family, its checkpoints, its sites and the visibility of frames.

The guide is docs/guides/add_a_family.md. This module imports no family: `mllm_seqpar.families` imports the modules of a
family on first use.
"""

from typing import NamedTuple


class FamilyEntry(NamedTuple):
    """Where a family is defined, and by which names it is found before anything of it is imported."""

    family: str
    """The module and the class, as an entry point names them."""
    model_class: str
    """The name of the class of its models."""
    chats: str
    """The module and the class of its chat format."""
    processor: str
    """The name of the class of its processors."""


FAMILIES = {
    "mplug_owl3": FamilyEntry(
        "mplug_owl3:MPlugOwl3Family",
        "MPlugOwl3ForConditionalGeneration",
        "chats.mplug_owl3:MPlugOwl3Chats",
        "MPlugOwl3Processor",
    ),
    "video_mllama": FamilyEntry(  # before its base class
        "video_mllama:VideoMllamaFamily",
        "VideoMllamaForConditionalGeneration",
        "chats.video_mllama:VideoMllamaChats",
        "VideoMllamaProcessor",
    ),
    "mllama": FamilyEntry(
        "mllama:MllamaFamily", "MllamaForConditionalGeneration", "chats.mllama:MllamaChats", "MllamaProcessor"
    ),
    "idefics": FamilyEntry(
        "idefics:IdeficsFamily", "IdeficsForVisionText2Text", "chats.idefics:IdeficsChats", "IdeficsProcessor"
    ),
    "open_flamingo": FamilyEntry(
        "open_flamingo:OpenFlamingoFamily", "Flamingo", "chats.open_flamingo:OpenFlamingoChats", "OpenFlamingoProcessor"
    ),
    "qwen2_5_vl": FamilyEntry(
        "qwen_vl:Qwen2_5_VLFamily",
        "Qwen2_5_VLForConditionalGeneration",
        "chats.qwen_vl:Qwen2_5_VLChats",
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": FamilyEntry(
        "qwen_vl:Qwen3VLFamily", "Qwen3VLForConditionalGeneration", "chats.qwen_vl:Qwen3VLChats", "Qwen3VLProcessor"
    ),
    "moss_vl": FamilyEntry(
        "moss_vl:MossVLFamily", "MossVLForConditionalGeneration", "chats.moss_vl:MossVLChats", "MossVLProcessor"
    ),
}
"""The families in the order in which adapters are tried."""
