"""Names of `chats` and `videos` for programs of users. Decoding, but not importing, needs the extra `video`."""

from mllm_seqpar.chats.batch import ChatBatch, ChatSample, MediaError, collate, load_local_images
from mllm_seqpar.chats.chat_family import ChatFamily, ChatText, chat_family
from mllm_seqpar.chats.clip import FrameSource, ImageListSource, VideoSource
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.store import FeatureStore, open_features, save_features
from mllm_seqpar.models.digests import model_fingerprint
from mllm_seqpar.videos.frame_choice import FrameChoice, plan_frames
from mllm_seqpar.videos.reader import read_frames
from mllm_seqpar.videos.video import FramePlan, VideoInfo, probe, scan, source_meta

__all__ = [
    "ChatBatch",
    "ChatDataset",
    "ChatFamily",
    "ChatSample",
    "ChatText",
    "FeatureStore",
    "FrameChoice",
    "FramePlan",
    "FrameSource",
    "ImageListSource",
    "MediaError",
    "VideoInfo",
    "VideoSource",
    "chat_family",
    "collate",
    "load_local_images",
    "model_fingerprint",
    "open_features",
    "plan_frames",
    "probe",
    "read_frames",
    "save_features",
    "scan",
    "source_meta",
]
