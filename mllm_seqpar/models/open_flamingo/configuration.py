from typing import Any, ClassVar, cast

from transformers import AutoConfig, CLIPVisionConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.auto_classes import SavedWithCode

IMAGE, END_OF_CHUNK = "<image>", "<|endofchunk|>"
LAYERS = {"gpt_neox": "gpt_neox.layers", "llama": "model.layers", "mpt": "transformer.blocks"}
LAYERS |= {"opt": "model.decoder.layers"}
"""The attribute path of the decoder layers in transformers' language models, by model type."""


class OpenFlamingoConfig(SavedWithCode, PreTrainedConfig):
    """Configuration of an OpenFlamingo model directory.

    Attributes:
        text_config: the language model's config, or its dict; its vocabulary includes `<image>` and `<|endofchunk|>`.
        vision_config: a `CLIPVisionConfig`, or its dict.
        media_token_id: the id of `<image>`.
        eoc_token_id: the id of `<|endofchunk|>`.
        cross_attn_every_n_layers: distance of the gated cross-attention blocks: 1 in the published 3B models, 2 in the
            4B models, 4 in the 9B models.
        only_attend_immediate_media: a token attends only to the last image before it.
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
        """`text_config` as a config object; `__post_init__` converts a dict."""
        return cast(PreTrainedConfig, self.text_config)

    @property
    def vision(self) -> CLIPVisionConfig:
        return cast(CLIPVisionConfig, self.vision_config)

    @property
    def layers(self) -> str:
        """The path of the decoder layers; ConfigError without a supported language model or a token id."""
        kind = getattr(self.text_config, "model_type", None)
        if kind not in LAYERS:
            raise ConfigError(f"text_config has model_type {kind!r}; OpenFlamingo supports {', '.join(LAYERS)}")
        for name in ("media_token_id", "eoc_token_id"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is missing; set it to the tokenizer's id of <image> or <|endofchunk|>")
        return LAYERS[kind]
