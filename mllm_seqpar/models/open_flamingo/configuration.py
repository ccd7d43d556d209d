from typing import Any, ClassVar, cast

from transformers import AutoConfig, CLIPVisionConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar.errors import ConfigError

LAYERS = {
    "gpt_neox": "gpt_neox.layers",
    "llama": "model.layers",
    "mpt": "transformer.blocks",
    "opt": "model.decoder.layers",
}
"""Where language models of transformers keep their decoder layers, by model type."""


class OpenFlamingoConfig(PreTrainedConfig):
    """Configuration of an OpenFlamingo model directory.

    Attributes:
        text_config: of the language model, its vocabulary with `<image>` and `<|endofchunk|>`; or its dict.
        vision_config: a `CLIPVisionConfig`, or its dict.
        media_token_id: of `<image>`.
        eoc_token_id: of `<|endofchunk|>`.
        cross_attn_every_n_layers: distance of the gated cross-attention blocks: the published 3B models have 1, the 4B
            ones 2, the 9B ones 4.
        only_attend_immediate_media: whether a token sees the last picture before it only.

    Raises:
        ConfigError: a language model of another type, or tokens that are missing.
    """

    model_type = "open_flamingo"
    # transformers up to 5.17 reads the first name, later ones the second.
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig, "vision_config": CLIPVisionConfig}
    sub_configs_defaults = {"vision_config": CLIPVisionConfig}

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    media_token_id: int | None = None
    eoc_token_id: int | None = None
    cross_attn_every_n_layers: int = 1
    only_attend_immediate_media: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            fields = dict(self.text_config)
            self.text_config = AutoConfig.for_model(fields.pop("model_type", ""), **fields)
        if self.vision_config is None:
            self.vision_config = CLIPVisionConfig()
        elif isinstance(self.vision_config, dict):
            self.vision_config = CLIPVisionConfig(**self.vision_config)
        super().__post_init__(**kwargs)

    @property
    def text(self) -> PreTrainedConfig:
        """`text_config`, which is a config and no dict any more once this object exists."""
        return cast(PreTrainedConfig, self.text_config)

    @property
    def vision(self) -> CLIPVisionConfig:
        """`vision_config`, likewise."""
        return cast(CLIPVisionConfig, self.vision_config)

    @property
    def layers(self) -> str:
        """Where the language model keeps its decoder layers.

        Raises:
            ConfigError: not known for this language model, or the config lacks what a model needs.
        """
        kind = getattr(self.text_config, "model_type", None)
        if kind not in LAYERS:
            raise ConfigError(f"text_config has model_type {kind!r}; OpenFlamingo is known over {', '.join(LAYERS)}")
        for name in ("media_token_id", "eoc_token_id"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is missing; it is the tokenizer's id of <image> or <|endofchunk|>")
        return LAYERS[kind]
