"""The supported model families: one folder each, and the one registry that lists them.

The folder `patches/` is installed as `mllm_seqpar.patches`. Adding a family means adding its folder and one
`FamilySpec` below; nothing else changes. Modules of a family folder are found by name, and each defines one function:

    README.md     five lines: the family, its checkpoints, its sites, its visibility, the contents of each file
    adapter.py    adapter() -> mllm_seqpar.patching.Adapter                     required, read by `patch_model`
    chat.py       chat_family(processor) -> mllm_seqpar.data.chat_family.ChatFamily    read if `processors` are named
    planner.py    model_sizes(config, name) -> ModelSizes of mllm_seqpar.planner    read if `model_types` are named
    testing.py    a tiny random model of the family and inputs for it           imported by the tests only

`adapter.py` may be split into further modules of the folder. The guide is docs/guides/add_a_family.md. This module
imports no family: `mllm_seqpar.families` imports the modules of a family on first use.
"""

from mllm_seqpar.families import FamilySpec

FAMILIES = (
    FamilySpec(folder="mplug_owl3", processors=("MPlugOwl3Processor",), model_types=("mplugowl3",)),
    FamilySpec(folder="mllama", processors=("MllamaProcessor",), model_types=("mllama",)),
    FamilySpec(folder="idefics", processors=("IdeficsProcessor",), model_types=("idefics",)),
    FamilySpec(folder="open_flamingo", processors=("OpenFlamingoProcessor",), model_types=("open_flamingo",)),
    FamilySpec(folder="qwen2_5_vl", processors=("Qwen2_5_VLProcessor",), model_types=("qwen2_5_vl",)),
    FamilySpec(folder="qwen3_vl", processors=("Qwen3VLProcessor",), model_types=("qwen3_vl",)),
)
