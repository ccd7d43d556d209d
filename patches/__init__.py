"""The supported model families: one folder each, and the one index that lists them.

The folder `patches/` is installed as `mllm_seqpar.patches`. Adding a family means adding its folder and one
`FamilySpec` below; nothing else changes. A family folder has

    README.md     five lines: the family, its checkpoints, its sites, its visibility, the contents of each file
    adapter.py    the family's class (`Family`): sites, visibility, forward, chat format
    sizes.py      model_sizes(config, name) -> ModelSizes, which the class has too; imported without torch

The guide is docs/guides/add_a_family.md. This module imports no family: `mllm_seqpar.families` imports the modules of a
family on first use.
"""

from mllm_seqpar.families import FamilySpec

FAMILIES = (
    FamilySpec(folder="mplug_owl3", family_class="MPlugOwl3Family", model_types=("mplugowl3",)),
    FamilySpec(folder="mllama", family_class="MllamaFamily", model_types=("mllama",)),
    FamilySpec(folder="idefics", family_class="IdeficsFamily", model_types=("idefics",)),
    FamilySpec(folder="open_flamingo", family_class="OpenFlamingoFamily", model_types=("open_flamingo",)),
    FamilySpec(folder="qwen2_5_vl", family_class="Qwen2_5_VLFamily", model_types=("qwen2_5_vl",)),
    FamilySpec(folder="qwen3_vl", family_class="Qwen3VLFamily", model_types=("qwen3_vl",)),
)
