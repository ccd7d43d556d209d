"""Questions about long videos: each rank encodes its frame shard, and generation attends to all frames.

    with launched_ranks() as (comm, device):
        model = patch_model(load_for_inference(path, "auto", device), group=comm)
        video = encode(model, processor, VideoSource.open("movie.mp4", fps=1), group=comm)
        print(answer(model, processor, "What happens?", video).text)

`ask` adds a command line, a progress bar, features that are stored on disk, and data sets of questions.
"""

from mllm_seqpar.cli.launch import launched_ranks

from .conversation import Conversation, answer
from .encoding import Encoded, encode
from .engine import load_for_inference, shard_weights
from .evidence import Evidence, attention_over_frames, record_attention
from .evidence_page import write_evidence_page
from .generation import Answer, Sampling
from .stored_features import load_video, open_store, save_video

EncodedVideo, encode_video = Encoded, encode  # their names before other media than videos were encoded

__all__ = [
    "Answer",
    "Conversation",
    "Encoded",
    "EncodedVideo",
    "Evidence",
    "Sampling",
    "answer",
    "attention_over_frames",
    "encode",
    "encode_video",
    "launched_ranks",
    "load_for_inference",
    "load_video",
    "open_store",
    "record_attention",
    "save_video",
    "shard_weights",
    "write_evidence_page",
]
