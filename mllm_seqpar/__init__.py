"""Exact sequence parallelism for multimodal LLMs: `model = patch_model(model, strategy="lv-xattn")`.

Frames reach the language model by cross-attention, or as tokens of its text (decoder-only models).

Names load on first use, so that importing the package imports neither torch nor transformers. The native models become
known to transformers' Auto classes. A checkout works without installation, given its folder in PYTHONPATH.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mllm_seqpar._lazy_names import lazy_names
from mllm_seqpar.models.auto_classes import register_on_import as _register_native_models

if TYPE_CHECKING:
    from mllm_seqpar.config import SeqParConfig
    from mllm_seqpar.inference.evidence import FrameAttention, attention_over_frames, record_attention
    from mllm_seqpar.masks import FrameMask
    from mllm_seqpar.patching import patch_model, unpatch_model
    from mllm_seqpar.patching.registry import register_adapter
    from mllm_seqpar.sharding import FrameShard, HostFrames, frame_range, frame_ranges, shard_sequence, unshard_sequence
    from mllm_seqpar.training.collator import SeqParDataCollator
    from mllm_seqpar.training.trainer import SeqParMixin, SeqParTrainer

__version__ = "0.2.0"

__all__ = [
    "FrameAttention",
    "FrameMask",
    "FrameShard",
    "HostFrames",
    "SeqParConfig",
    "SeqParDataCollator",
    "SeqParMixin",
    "SeqParTrainer",
    "attention_over_frames",
    "frame_range",
    "frame_ranges",
    "patch_model",
    "record_attention",
    "register_adapter",
    "shard_sequence",
    "unpatch_model",
    "unshard_sequence",
]

_EXPORTED_FROM = {
    "FrameAttention": "inference.evidence",
    "FrameMask": "masks",
    "FrameShard": "sharding",
    "HostFrames": "sharding",
    "SeqParConfig": "config",
    "SeqParDataCollator": "training.collator",
    "SeqParMixin": "training.trainer",
    "SeqParTrainer": "training.trainer",
    "attention_over_frames": "inference.evidence",
    "frame_range": "sharding",
    "frame_ranges": "sharding",
    "patch_model": "patching",
    "record_attention": "inference.evidence",
    "register_adapter": "patching.registry",
    "shard_sequence": "sharding",
    "unpatch_model": "patching",
    "unshard_sequence": "sharding",
}


lazy_names(__name__, _EXPORTED_FROM)

_folder = Path(__file__).parent
if not (_folder / "patches").exists() and (_folder.parent / "patches" / "sizes.py").exists():
    # In a checkout, the families lie beside the package. An editable install finds the same files.
    __path__.append(str(_folder.parent))


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTED_FROM])


_register_native_models()
