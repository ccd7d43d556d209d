"""The supported model families, and the one index that lists them.

The folder `patches/` is installed as `mllm_seqpar.patches`. A family is a module with a class (`Family`) that has its
sites, visibility, forward and chat format, a function of `sizes.py`, an entry in `FAMILIES`, and four lines in
`README.md`: the family, its checkpoints, its sites and the visibility of frames.

The guide is docs/guides/add_a_family.md. This module imports no family: `mllm_seqpar.families` imports the modules of a
family on first use.
"""

FAMILIES = {
    "mplug_owl3": "mplug_owl3:MPlugOwl3Family",
    "mllama": "mllama:MllamaFamily",
    "idefics": "idefics:IdeficsFamily",
    "open_flamingo": "open_flamingo:OpenFlamingoFamily",
    "qwen2_5_vl": "qwen_vl:Qwen2_5_VLFamily",
    "qwen3_vl": "qwen_vl:Qwen3VLFamily",
    "moss_vl": "moss_vl:MossVLFamily",
}
"""The module and the class of each family, as an entry point names them, in the order in which adapters are tried."""
