from typing import Any, ClassVar, cast

from transformers import Qwen2Config, SiglipVisionConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar.errors import ConfigError, require_distinct, require_one_of
from mllm_seqpar.models.auto_classes import SavedWithCode

GATES = ("per_head", "vector", None)
AUTO = "auto"
"""The gate of a config that does not state it; `from_pretrained` replaces it with the gate of the weights."""

_DEFAULT_HYPER_LAYERS = (1, 9, 17, 25)
_DEFAULT_VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}
_DEFAULT_VISION |= {"image_size": 384, "patch_size": 14}


class MPlugOwl3Config(SavedWithCode, Qwen2Config):
    """Configuration of mPLUG-Owl3: Qwen2's fields, and fields for hyper attention and the vision tower.

    A published `config.json` loads unchanged. It states neither `gate` nor `projector_layers`, which differ between the
    published generations. `MPlugOwl3ForConditionalGeneration.from_pretrained` determines both from the names of the
    weights, and saving writes them. Absent keys have the published defaults.

    Attributes:
        hyper_layers: the decoder layers with hyper attention, counted from 1 as published: layer index i has it if
            i + 1 is in the list. [1, 9, 17, 25] if None.
        vision_config: a `SiglipVisionConfig`, or its dict; SigLIP-so400m if None.
        gate: how a hyper layer mixes visual and text attention. "per_head": a linear layer and a sigmoid of each head
            of the text's attention output (7B-240728). "vector": one learned weight per channel (1B and 2B-241014).
            None: no gate, one softmax over visual and text keys (241101). "auto": unknown until the model is loaded.
        projector_layers: 1 or 2 linear layers between the vision tower and the text. None: unknown until the model is
            loaded; a new model gets the number of layers of the generation with its gate.
        vision_batch_size: the number of frames that the vision tower encodes at once; all frames if None.
        image_token_id: the placeholder token, one per frame, for tokenizers that have such a token (the published ones
            do not). It is used only if `media_offset` is not given.

    Raises:
        ConfigError: an unknown gate or projector, a hyper layer that the model does not have, or a rotary type whose
            frequencies depend on the sequence length.
    """

    model_type = "mplugowl3"
    # transformers up to 5.17 reads the first name, later ones the second.
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {"vision_config": SiglipVisionConfig}
    sub_configs_defaults = {"vision_config": SiglipVisionConfig}

    hyper_layers: list[int] | None = None
    vision_config: dict | PreTrainedConfig | None = None
    gate: str | None = AUTO
    projector_layers: int | None = None
    vision_batch_size: int | None = None
    image_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if "variant" in kwargs:
            raise ConfigError(
                f"variant={kwargs['variant']!r} is not a field of this config: state gate='vector' for the former "
                "'gated' and gate=None for 'fused', or leave it to the weights"
            )
        if self.vision_config is None:
            self.vision_config = SiglipVisionConfig(**_DEFAULT_VISION)
        elif isinstance(self.vision_config, dict):
            self.vision_config = SiglipVisionConfig(**self.vision_config)
        self.hyper_layers = sorted(_DEFAULT_HYPER_LAYERS if self.hyper_layers is None else self.hyper_layers)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def vision(self) -> SiglipVisionConfig:
        """`vision_config` as a config object; `__post_init__` converts a dict."""
        return cast(SiglipVisionConfig, self.vision_config)

    def check(self) -> None:
        """Raise ConfigError if a field, or a combination of fields, is not supported."""
        require_one_of("gate", self.gate, (*GATES, AUTO), f" ({AUTO!r}: that of the weights)")
        require_one_of("projector_layers", self.projector_layers, (1, 2, None), " (None: those of the weights)")
        if self.vision_batch_size is not None and self.vision_batch_size < 1:
            raise ConfigError(
                f"vision_batch_size is {self.vision_batch_size}; expected at least 1, or None for no limit"
            )
        count = self.num_hidden_layers
        note = f": layers counted from 1, up to num_hidden_layers={count}"
        require_distinct("hyper_layers", self.hyper_layers or [], 1, count, note)
        refuse_length_dependent_rope(self)


def refuse_length_dependent_rope(config: Any) -> None:
    """Raise ConfigError for a rotary type whose frequencies depend on the longest position of a call.

    Text and frames are rotated separately and would get different frequencies.
    """
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"rope_type is {rope_type!r}, whose frequencies depend on the sequence length; frames and text need "
            "the same frequencies: use default, linear, yarn or llama3"
        )
