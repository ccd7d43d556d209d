"""The vision tower and the language model of mPLUG-Owl3: transformers' own classes with the differing parts replaced.

Shape legend: F frames, T tokens per frame, H and W the height and width of a frame.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from mllm_seqpar.errors import ShapeError

from .configuration import MPlugOwl3Config
from .hyper_attention import HyperAttention, HyperDecoderLayer


class MPlugOwl3VisionModel(SiglipVisionModel):
    """SigLIP's vision tower; a separate class, so that transformers' renaming rules for SigLIP do not apply to it."""

    def penultimate(self, pixel_values: Tensor) -> Tensor:
        """Frames (F, 3, H, W) -> `hidden_states[-2]` (F, T, width), without computing the last layer."""
        config = self.config
        grid = config.image_size // config.patch_size
        if pixel_values.dim() != 4 or any(side // config.patch_size != grid for side in pixel_values.shape[2:]):
            raise ShapeError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; expected "
                f"(frames, {config.num_channels}, {config.image_size}, {config.image_size})"
            )
        hidden_states = self.embeddings(pixel_values)
        for layer in self.encoder.layers[:-1]:
            hidden_states = layer(hidden_states, None)
        return hidden_states


class HyperQwen2Model(Qwen2Model):
    """Qwen2 with hyper attention in `config.hyper_layers`; the keyword argument `visual` is passed to every layer."""

    config: MPlugOwl3Config
    _no_split_modules = ["Qwen2DecoderLayer", "HyperDecoderLayer"]
    # Flash and flex attention cannot express the frame masks and the joint softmax.
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: MPlugOwl3Config) -> None:
        super().__init__(config)
        for number in config.hyper_layers or []:
            self.layers[number - 1] = HyperDecoderLayer(config, number - 1)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HyperAttention) and module.gate is not None:
            init.zeros_(module.gate)


class HyperQwen2ForCausalLM(Qwen2ForCausalLM):
    """The language model: `HyperQwen2Model` and the output projection."""

    config: MPlugOwl3Config
    _no_split_modules = HyperQwen2Model._no_split_modules
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: MPlugOwl3Config) -> None:
        super(Qwen2ForCausalLM, self).__init__(config)  # Qwen2ForCausalLM.__init__ would build a second Qwen2Model.
        self.model = HyperQwen2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
