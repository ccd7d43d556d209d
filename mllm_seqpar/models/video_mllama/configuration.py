import math
from typing import Any

from transformers.models.mllama.configuration_mllama import MllamaConfig

from mllm_seqpar.errors import ConfigError, require_one_of
from mllm_seqpar.models.auto_classes import SavedWithCode

PUBLISHED_CLASS = "VideoMllamaForConditionalGeneration"
_POOL_MODES = ("average", "max", "bilinear", "channelFusion", None)


class VideoMllamaConfig(SavedWithCode, MllamaConfig):
    """Configuration of MOSS-Video-Preview: `MllamaConfig`, with the pooling of frames and the weight of silence.

    A published `config.json` loads unchanged, also with `model_type` "mllama", if `architectures` names the class of
    the model. Absent fields have the values of the published training.

    Attributes:
        pool_mode: how the patches of a frame are pooled: "average", "max", "bilinear" (interpolation), "channelFusion"
            (a convolution with weights of its own), or None.
        stride: the side of the square of patches that becomes one token.
        video_token_index: the id of `<|video|>`, which stands for all frames of a video in a text.
        silence_token_id: the token that means that the model has nothing to say; None or a negative number: none.
        silence_token_weight: the weight of the loss where the target is the silence token.

    Raises:
        ConfigError: an unknown pooling mode, a stride that is not positive, or a frame without tokens.
    """

    model_type = "video_mllama"

    pool_mode: str | None = "average"
    stride: int | None = 4
    video_token_index: int = 128255
    silence_token_id: int | None = None
    silence_token_weight: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require_one_of("pool_mode", self.pool_mode, _POOL_MODES)
        if self.pool_mode is not None and not 1 <= (self.stride or 0) <= self.patches_per_side:
            raise ConfigError(
                f"stride is {self.stride!r}; pooling needs a number of patches, from 1 to the {self.patches_per_side} "
                "of a side of the image"
            )

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == MllamaConfig.model_type:
            if PUBLISHED_CLASS not in (fields.get("architectures") or ()):
                raise ConfigError(
                    f"config.json describes a model of type {MllamaConfig.model_type!r} whose architectures are "
                    f"{fields.get('architectures')}; expected {PUBLISHED_CLASS}. Load Llama 3.2 Vision as "
                    "transformers' MllamaForConditionalGeneration"
                )
            fields["model_type"] = cls.model_type
        return fields, kwargs

    @property
    def patches_per_side(self) -> int:
        """The number of patches along a side of a frame."""
        vision: Any = self.vision_config
        return int(vision.image_size // vision.patch_size)

    @property
    def tokens_per_frame(self) -> int:
        """The number of visual tokens of a frame: its pooled patches and the class token."""
        side = self.patches_per_side
        if self.pool_mode is not None:
            assert self.stride is not None
            side = math.ceil(side / self.stride) if self.pool_mode == "bilinear" else side // self.stride
        return side**2 + 1
