"""The configuration of MOSS-VL: Qwen3-VL's fields for tower and text, and the layers with cross-attention."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from transformers import Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError, require_distinct
from mllm_seqpar.models.auto_classes import SavedWithCode
from mllm_seqpar.models.mplug_owl3.configuration import refuse_length_dependent_rope

_log = get_logger(__name__)

_REQUIRED = {
    "text_config": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "cross_attention_layers"),
    ),
    "vision_config": (
        *("hidden_size", "intermediate_size", "depth", "num_heads", "out_hidden_size", "num_position_embeddings"),
        "deepstack_visual_indexes",
    ),
}
"""The fields without a default: the published class has other defaults than the published models."""

_ASSUMED = {
    "text_config": ("hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling"),
    "vision_config": ("hidden_act", "in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size"),
}
"""The fields of a published file whose absence is reported, because a default takes their place."""

_ROPE = ("rope_theta", "rope_scaling")


class MossVLVisionConfig(Qwen3VLVisionConfig):
    """The configuration of the vision tower, with Qwen3-VL's fields; defaults are those of the published models."""

    model_type = "moss_vl_vision"

    temporal_patch_size: int = 1
    out_hidden_size: int = 4096


class MossVLTextConfig(Qwen3VLTextConfig):
    """The configuration of the language model; defaults are those of the published models.

    Attributes:
        cross_attention_layers: the layers, counted from 0, that attend to frames in place of the text.
    """

    model_type = "moss_vl_text"
    default_theta = 5000000.0

    intermediate_size: int = 12288
    num_hidden_layers: int = 48
    num_key_value_heads: int = 8
    max_position_embeddings: int = 262144
    cross_attention_layers: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.cross_attention_layers is None:
            self.cross_attention_layers = list(range(2, self.num_hidden_layers, 4))
        super().__post_init__(**kwargs)


_PARTS: dict[str, type[PreTrainedConfig]] = {"text_config": MossVLTextConfig, "vision_config": MossVLVisionConfig}


class MossVLConfig(SavedWithCode, PreTrainedConfig):
    """Configuration of MOSS-VL. A published `config.json` loads unchanged.

    Attributes:
        text_config: a `MossVLTextConfig`, or its dict, which must state all sizes; the published one if None.
        vision_config: a `MossVLVisionConfig`, or its dict, which must state all sizes; the published one if None.
        image_token_id: the placeholder `<|image_pad|>`, one per frame.
        vision_seq_pad_multiple: padding of the published model's visual sequences. It changes no result, and has no
            effect here.

    Raises:
        ConfigError: a size that a dict does not state, or fields that contradict each other.
    """

    model_type = "moss_vl"
    # transformers up to 5.17 reads the first name, later ones the second.
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = dict(_PARTS)
    sub_configs_defaults = dict(_PARTS)

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    vision_seq_pad_multiple: int = 8
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name, kind in _PARTS.items():
            given = getattr(self, name)
            if isinstance(given, Mapping):
                _check_fields(name, given)
                setattr(self, name, kind(**{key: x for key, x in given.items() if key != "model_type"}))
            elif given is None:
                setattr(self, name, kind())
        super().__post_init__(**kwargs)
        self.check()

    @property
    def text(self) -> MossVLTextConfig:
        """`text_config` as a config object; `__post_init__` converts a dict."""
        return cast(MossVLTextConfig, self.text_config)

    @property
    def vision(self) -> MossVLVisionConfig:
        """`vision_config` as a config object; `__post_init__` converts a dict."""
        return cast(MossVLVisionConfig, self.vision_config)

    def check(self) -> None:
        """Raise ConfigError if a field, or a combination of fields, is not supported."""
        text, vision = self.text, self.vision
        note = ": layer 0 attends to the text, because the cache counts tokens there"
        require_distinct(
            "cross_attention_layers", text.cross_attention_layers or [], 1, text.num_hidden_layers - 1, note
        )
        blocks = vision.deepstack_visual_indexes
        require_distinct("deepstack_visual_indexes", blocks, 0, vision.depth - 1, ": blocks of the tower")
        if vision.out_hidden_size != text.hidden_size:
            raise ConfigError(
                f"out_hidden_size is {vision.out_hidden_size} and hidden_size of the text is {text.hidden_size}; they "
                "must be equal"
            )
        if vision.temporal_patch_size != 1:
            raise ConfigError(
                f"temporal_patch_size is {vision.temporal_patch_size}; expected 1, because each frame is encoded on "
                "its own"
            )
        refuse_length_dependent_rope(text)


def _check_fields(name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size that the dict of a configuration does not state; report other missing fields."""
    if missing := [field for field in _REQUIRED[name] if given.get(field) is None]:
        raise ConfigError(
            f"{name} does not state {', '.join(missing)}; state all sizes, as the published config.json does: the "
            "published models differ from the defaults of their class"
        )
    has_rope = given.get("rope_parameters") is not None
    assumed = [field for field in _ASSUMED[name] if field not in given and not (has_rope and field in _ROPE)]
    if assumed:
        _log.warning("%s does not state %s; the published values are used", name, ", ".join(assumed))
