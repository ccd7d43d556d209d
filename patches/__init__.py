"""The supported model families, and the one index that lists them.

The folder `patches/` is installed as `mllm_seqpar.patches`. A family is a module with a class (`Family`) that has its
sites, visibility, forward and chat format, a function of `sizes.py`, an entry in `FAMILIES`, and four lines in
`README.md`: the family, its checkpoints, its sites and the visibility of frames.

The guide is docs/guides/add_a_family.md. This module imports no family: `mllm_seqpar.families` imports the modules of a
family on first use.
"""

from mllm_seqpar.families import FamilySpec

FAMILIES = (
    FamilySpec(name="mplug_owl3", family_class="MPlugOwl3Family", model_types=("mplugowl3",)),
    FamilySpec(name="mllama", family_class="MllamaFamily", model_types=("mllama",)),
    FamilySpec(name="idefics", family_class="IdeficsFamily", model_types=("idefics",)),
    FamilySpec(name="open_flamingo", family_class="OpenFlamingoFamily", model_types=("open_flamingo",)),
    FamilySpec(name="qwen2_5_vl", module="qwen_vl", family_class="Qwen2_5_VLFamily", model_types=("qwen2_5_vl",)),
    FamilySpec(name="qwen3_vl", module="qwen_vl", family_class="Qwen3VLFamily", model_types=("qwen3_vl",)),
)
