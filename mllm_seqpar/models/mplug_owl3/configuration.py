from typing import Any, ClassVar, cast

from transformers import Qwen2Config, SiglipVisionConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar.errors import ConfigError

VARIANTS = ("gated", "fused")

# Rotary types whose frequencies depend on the longest position of a call: text and frames, rotated apart, would not
# agree.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class MPlugOwl3Config(Qwen2Config):
    """Configuration of mPLUG-Owl3: Qwen2's fields, flat, and what hyper attention and the vision tower add.

    A published `config.json` loads as it is: it has neither `variant` nor `image_token_id`. The variant is then found
    from the weights by `MPlugOwl3ForConditionalGeneration.from_pretrained`.

    Attributes:
        hyper_layers: the decoder layers with hyper attention, counted from 1 as published: layer index i is one when
            i + 1 is in the list.
        vision_config: a `SiglipVisionConfig`, or its dict.
        variant: "gated" (visual attention has its own softmax and a learned gate mixes it in), "fused" (one softmax
            over visual and text keys), or None while it is unknown.
        image_token_id: the placeholder token, one per frame. Needed only where `media_offset` is not given.

    Raises:
        ConfigError: a variant that does not exist, a hyper layer that the model does not have, a rotary type whose
            frequencies depend on the sequence length.
    """

    model_type = "mplugowl3"
    # transformers up to 5.17 reads the first name, later ones the second.
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {"vision_config": SiglipVisionConfig}
    sub_configs_defaults = {"vision_config": SiglipVisionConfig}

    hyper_layers: list[int] | None = None
    vision_config: dict | PreTrainedConfig | None = None
    variant: str | None = None
    image_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.vision_config is None:
            self.vision_config = SiglipVisionConfig()
        elif isinstance(self.vision_config, dict):
            self.vision_config = SiglipVisionConfig(**self.vision_config)
        self.hyper_layers = sorted(self.hyper_layers or [])
        super().__post_init__(**kwargs)
        self._check()

    @property
    def vision(self) -> SiglipVisionConfig:
        """`vision_config`, which is a config and no dict any more once this object exists."""
        return cast(SiglipVisionConfig, self.vision_config)

    def _check(self) -> None:
        if self.variant is not None and self.variant not in VARIANTS:
            raise ConfigError(f"variant is {self.variant!r}; it is one of {', '.join(VARIANTS)}, or None to be found")
        layers = self.hyper_layers or []
        outside = [number for number in layers if not 1 <= number <= self.num_hidden_layers]
        if outside or len(set(layers)) != len(layers):
            raise ConfigError(
                f"hyper_layers is {layers}; it lists distinct layers counted from 1, at most "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"rope_type is {rope_type!r}, whose frequencies depend on the sequence length; frames and text need "
                "the same ones: use default, linear, yarn or llama3"
            )
