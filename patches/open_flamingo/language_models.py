"""The language models under an OpenFlamingo: how each runs its layers, and where its positions come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.transformers import attention as hf_attention
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.forward_state import ForwardState

from .mpt import MptLM
from .opt import chunk_feed_forwards


class RotaryLM:
    """LLaMA and GPT-NeoX: rotary positions that count every token, attention through transformers' interface."""

    packs = True
    """Whether positions tell packed sequences apart, when there is no attention mask and no cache."""

    def __init__(self, language_model: Any) -> None:
        self.model = language_model
        stack = language_model
        for name in language_model.decoder_layers_attr_name.split(".")[:-1]:
            stack = getattr(stack, name)
        self.stack = stack

    def check(self) -> None:
        """Raises ConfigError for what would come out differently on every rank."""

    def install(self, patch: Patch) -> None:
        """Selects the attention function for these layers, and has their MLPs computed in chunks."""
        attention = [m for m in self.stack.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
        patch.guard(self.model, attention)
        hf_attention.select(patch, attention)
        self._attention_config = attention[0].config
        self.chunk_mlps(patch)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return a causal mask; see `Family.text_mask`."""
        return hf_attention.causal_mask(self._attention_config, embeds, mask, positions, cache)

    def chunk_mlps(self, patch: Patch) -> None:
        """As `mlp_chunk_size` says; blocks may be in the wrappers of activation checkpointing."""
        chunk_forwards(patch, (block.mlp for block in self.model.old_decoder_blocks))

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        """(B or 1, L) positions of the whole text, before it is dealt to ranks; None: 0, 1, 2, ..."""
        return given

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Any, call: ForwardState, **kwargs: Any
    ) -> Any:
        """Runs the layers; see `Family.decode`."""
        return self.stack(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
            seqpar=call,
            **kwargs,
        )


class OptLM(RotaryLM):
    """OPT: learned positions that count the tokens which are not padding."""

    packs = False

    def check(self) -> None:
        """Layers that are left out by chance would be others on every rank."""
        if self.stack.layerdrop:
            raise ConfigError(
                f"layerdrop={self.stack.layerdrop}: every rank would leave out other layers; set "
                "model.lang_encoder.model.decoder.layerdrop = 0.0 before patching"
            )

    def chunk_mlps(self, patch: Patch) -> None:
        """Its layers have no MLP module: two projections and what is around them."""
        chunk_feed_forwards(patch, self.stack)

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Counted over the whole text: a rank that has a part of it could not."""
        if given is not None or mask is None or mask.dim() != 2:
            return given
        past = 0 if cache is None else cache.get_seq_length()
        return (mask.cumsum(dim=1) * mask - 1).long()[:, past:]


def language_model_of(language_model: Any) -> Any:
    """How the layers of this language model are run; its `model_type` is one of `LANGUAGE_MODELS`."""
    return LANGUAGE_MODELS[language_model.config.model_type](language_model)


LANGUAGE_MODELS: dict[str, Any] = {"opt": OptLM, "llama": RotaryLM, "mpt": MptLM, "gpt_neox": RotaryLM}
