"""Videos, the features store, chat data and the needle task. Needs the extra `video` to decode, nothing to import."""

from .reader import read_frames
from .sources import FrameSource, ImageListSource, VideoSource
from .video import FramePlan, VideoInfo, plan_frames, probe, scan

__all__ = [
    "FramePlan",
    "FrameSource",
    "ImageListSource",
    "VideoInfo",
    "VideoSource",
    "plan_frames",
    "probe",
    "read_frames",
    "scan",
]
