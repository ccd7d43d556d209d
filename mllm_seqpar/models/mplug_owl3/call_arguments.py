"""Arguments of the processor's calls: what it supports of transformers' arguments, and the videos."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.processing_utils import ProcessingKwargs, VideosKwargs

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.processor import flattened

from .chat import VIDEO
from .image_processing import ImageOptions

_OF_FRAMES = set(ImageOptions.__annotations__)
_OF_VIDEOS = {"fps", "num_frames", "do_sample_frames"}

SUPPORTED = {
    "text_kwargs": {
        *("padding", "padding_side", "pad_to_multiple_of", "max_length", "truncation", "return_tensors"),
        *("return_attention_mask", "return_offsets_mapping", "add_special_tokens", "verbose"),
    },
    "images_kwargs": {"cut_enable", *_OF_FRAMES},
    "videos_kwargs": _OF_VIDEOS | (_OF_FRAMES & set(VideosKwargs.__annotations__) - {"input_data_format"}),
}
"""The arguments that a call takes, by modality; the format has no special tokens that a tokenizer adds."""


class MPlugOwl3ImagesKwargs(ImageOptions, total=False):  # type: ignore[call-arg]
    cut_enable: bool


class MPlugOwl3ProcessorKwargs(ProcessingKwargs, total=False):  # type: ignore[call-arg]
    images_kwargs: MPlugOwl3ImagesKwargs


def frame_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the image processor among the arguments of images or of videos."""
    return {name: arguments[name] for name in _OF_FRAMES - {"return_tensors", "input_data_format"} if name in arguments}


def row_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `token_rows` for those of transformers' tokenizers."""
    padding, longest = arguments.get("padding"), arguments.get("max_length")
    to_longest = padding in (True, "longest", "max_length")
    if padding == "max_length" and longest is None:
        raise DataError("padding is 'max_length' and max_length is not given; pass max_length")
    truncated = arguments.get("truncation") in (True, "longest_first", "only_first")
    return {
        "padding": to_longest,
        "padding_side": arguments.get("padding_side"),
        "padded_length": longest if padding == "max_length" else None,
        "multiple_of": arguments.get("pad_to_multiple_of"),
        "most_tokens": longest if truncated else None,
        "return_offsets": bool(arguments.get("return_offsets_mapping")),
    }


def videos_of(videos: Any, counts: Sequence[int], options: Mapping[str, Any]) -> list[Any]:
    """Return the frames of each video in one list; files are decoded."""
    videos = list(videos)
    nested = [isinstance(x, (list, tuple)) and (not x or _is_video(x[0])) for x in videos]
    if videos and all(nested):  # a list of videos for each text
        videos = flattened(videos, counts, VIDEO, "videos")
    sampling = {name: options[name] for name in ("fps", "num_frames") if options.get(name)}
    if sampling and (decoded := [x for x in videos if not isinstance(x, (str, os.PathLike))]):
        raise DataError(
            f"{', '.join(sampling)}: {len(decoded)} of the videos are frames already; choose the frames before, or "
            "pass the path of the file"
        )
    return [_decoded(x, sampling) if isinstance(x, (str, os.PathLike)) else x for x in videos]


def _is_video(item: Any) -> bool:
    """Return whether an item of a list is a video, and not a frame of one."""
    return isinstance(item, (str, os.PathLike, list, tuple)) or getattr(item, "ndim", 0) == 4


def _decoded(path: str | os.PathLike, sampling: Mapping[str, Any]) -> Tensor:
    """Return the frames (n, 3, H, W) of a video file or URL, by the rules of all commands of this package."""
    from mllm_seqpar.data.sources import VideoSource

    source = VideoSource.open(path, **(sampling or {"fps": 1.0}))
    return torch.cat(list(source.read(0, len(source))))
