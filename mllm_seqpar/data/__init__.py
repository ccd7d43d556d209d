"""Videos, the feature store, chat data and the needle task. Decoding, but not importing, needs the extra `video`."""

from .chat import ChatBatch, ChatDataset, ChatSample, MediaError, collate, load_local_images
from .chat_family import ChatFamily, ChatText, chat_family
from .feature_store import FeatureStore, model_fingerprint, open_features, save_features
from .frame_choice import FrameChoice
from .reader import read_frames
from .sources import FrameSource, ImageListSource, VideoSource
from .video import FramePlan, VideoInfo, plan_frames, probe, scan, source_meta

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
