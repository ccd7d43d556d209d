"""What adapters of models of transformers use besides `toolkit`: `Family`, and what its methods and layers use."""

from mllm_seqpar._compat import cache_argument, cache_name, cache_of, takes_cache
from mllm_seqpar.integrations.transformers.attention import (
    causal_mask,
    merge_heads,
    model_attention,
    refuse_dropout,
    split_heads,
    use_seqpar_attention,
)
from mllm_seqpar.integrations.transformers.checks import check_frames, require_same_inputs
from mllm_seqpar.integrations.transformers.family import (
    MULTIMODAL_OUTPUT,
    DecoderOnlyFamily,
    Family,
    as_forward,
    decoder_arguments,
    mask_over_samples,
)
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs, as_compared_tensors
from mllm_seqpar.integrations.transformers.passes import run_pass
from mllm_seqpar.integrations.transformers.rotary import rotate_by_whole_text
from mllm_seqpar.integrations.transformers.tower import local_features
from mllm_seqpar.models.cache import SequenceParallelCacheState, cache_state_of, mark_visual_layers

__all__ = [
    "MULTIMODAL_OUTPUT",
    "DecoderOnlyFamily",
    "Family",
    "ForwardInputs",
    "SequenceParallelCacheState",
    "as_compared_tensors",
    "as_forward",
    "cache_argument",
    "cache_name",
    "cache_of",
    "cache_state_of",
    "causal_mask",
    "check_frames",
    "decoder_arguments",
    "local_features",
    "mark_visual_layers",
    "mask_over_samples",
    "merge_heads",
    "model_attention",
    "patch_generate",
    "refuse_dropout",
    "require_same_inputs",
    "rotate_by_whole_text",
    "run_pass",
    "split_heads",
    "takes_cache",
    "use_seqpar_attention",
]
