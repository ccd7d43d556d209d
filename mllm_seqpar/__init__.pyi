"""The names of `mllm_seqpar` and the modules that define them; `__init__.py` reads this file."""

from mllm_seqpar.config import SeqParConfig as SeqParConfig
from mllm_seqpar.inference.attention_record import FrameAttention as FrameAttention
from mllm_seqpar.inference.evidence import attention_over_frames as attention_over_frames
from mllm_seqpar.inference.evidence import record_attention as record_attention
from mllm_seqpar.masks import FrameMask as FrameMask
from mllm_seqpar.patching import patch_model as patch_model
from mllm_seqpar.patching import unpatch_model as unpatch_model
from mllm_seqpar.patching.registry import register_adapter as register_adapter
from mllm_seqpar.sharding import FrameShard as FrameShard
from mllm_seqpar.sharding import HostFrames as HostFrames
from mllm_seqpar.sharding import frame_range as frame_range
from mllm_seqpar.sharding import frame_ranges as frame_ranges
from mllm_seqpar.sharding import shard_sequence as shard_sequence
from mllm_seqpar.sharding import unshard_sequence as unshard_sequence
from mllm_seqpar.training.collator import SeqParDataCollator as SeqParDataCollator
from mllm_seqpar.training.trainer import SeqParMixin as SeqParMixin
from mllm_seqpar.training.trainer import SeqParTrainer as SeqParTrainer

__version__: str
