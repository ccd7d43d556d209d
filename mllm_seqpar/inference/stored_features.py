"""Write and read encoded videos on all ranks, with collective checks; `chats.store` has the file format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar.chats.chat_family import ChatFamily
from mllm_seqpar.chats.clip import VideoSource
from mllm_seqpar.chats.store import FeatureStore, open_features, save_features
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.digests import model_fingerprint
from mllm_seqpar.sharding import FrameShard, FrameSizes
from mllm_seqpar.videos.frame_choice import FrameChoice
from mllm_seqpar.videos.video import source_meta

from .encoding import Encoded
from .generation import require_finite


def save_video(directory: str, video: Encoded, comm: Communicator, meta: Mapping[str, Any]) -> None:
    """Write the features of an encoded video, each rank its shard. Return when all ranks have written.

    Args:
        directory: on a file system that all ranks share; created if it does not exist.
        video: the features.
        comm: the group that encoded the video.
        meta: what the features depend on; the value of rank 0 is written.

    Raises:
        DataError: if this rank cannot write, or the directory has the features of another video. AgreementError: if
            another rank cannot.
        NonFiniteLogitsError: on all ranks, if features are NaN or infinite.
    """
    rank_0_meta = json.loads(comm.gather_texts(json.dumps(dict(meta)))[0])
    agree(comm, "saving the features", lambda: require_replaceable(directory, rank_0_meta))
    require_finite(bool(video.features.isfinite().all()), "visual features", video.features.dtype, comm)
    shard = video.shard

    def write() -> None:
        sizes = FrameSizes(shard.total, video.sizes)
        layout = shard.layout(comm.rank, comm.size, sizes) or "contiguous"
        features = video.features if video.features.dim() == 3 else video.features.unsqueeze(1)
        placement = {"start": shard.start, "total": shard.total, "rank": comm.rank, "world": comm.size}
        save_features(directory, features, **placement, layout=layout, sizes=video.sizes, meta=rank_0_meta)

    agree(comm, "saving the features", write)


def require_replaceable(directory: str, meta: Mapping[str, Any]) -> None:
    """Raise DataError if `directory` has the features of another video than that of `meta` (see `feature_meta`).

    Features of the same video, encoded by another model or at other times, may be replaced. Without a complete store
    in the directory, or metadata of the video, there is nothing to compare.
    """
    try:
        stored = json.loads(Path(directory, FeatureStore.INDEX).read_text())["meta"]
    except (OSError, KeyError, TypeError, ValueError):
        return
    identities = [(stored.get(name), meta.get(name)) for name in ("source_digest", "source_size")]
    if any(None not in pair and pair[0] != pair[1] for pair in identities):
        raise DataError(
            f"{directory}: it has the features of another video, {stored.get('source_path')}; give --save_features "
            "another directory, or delete this one"
        )


def load_video(
    store: FeatureStore,
    chat_format: ChatFamily,
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mapped: bool = False,
) -> Encoded:
    """Read this rank's frames of a store; `mapped` maps them from their file instead (`FeatureStore.map`).

    Raises:
        DataError: if the features have another dtype than the model, which would change the answers.
    """
    if store.dtype != dtype:
        stored, needed = (str(kind).removeprefix("torch.") for kind in (store.dtype, dtype))
        raise DataError(
            f"{store.directory}: these features are {stored} and the model runs in {needed}; use --dtype {stored}, or "
            "encode the video again with --save_features"
        )
    total = store.total_frames
    layouts = [chat_format.frame_layout, "contiguous"]  # the second if one rank has written the store
    usable = (x for x in layouts if store.can_map(store.sizes.spans(comm.size, x)))
    layout = next(usable, layouts[0]) if mapped else layouts[0]
    sizes = store.sizes.per_frame.tolist() if isinstance(store.sizes.per_frame, torch.Tensor) else None
    shard = FrameShard.of(total, comm, layout, sizes)
    features = store.map(*shard.spans) if mapped else store.read(*shard.spans, device=device)
    features = features if sizes is None else features.flatten(0, 1)
    return Encoded(features, shard, chat_format.stored_frames(total, store.meta), sizes=sizes)


def feature_meta(source: VideoSource, model: str, chat_format: ChatFamily, frames: FrameChoice) -> dict[str, Any]:
    """Return what the features of `source` depend on, for the store: video, choice of frames, and model directory."""
    pixels = _pixels(source)
    return {
        **source_meta(source.plan),
        **vars(frames),
        **chat_format.frame_metadata(source),
        **({} if pixels is None else {"pixels": pixels}),
        "model": model_fingerprint(model, chat_format.feature_weights),
    }


def _pixels(source: VideoSource) -> str | None:
    """Return how pixels of a frame store differ from those of the video; None if they are equal."""
    return None if source.stored is None else source.stored.pixels


def open_store(
    directory: str, model: str, chat_format: ChatFamily, source: VideoSource | None, frames: FrameChoice
) -> FeatureStore:
    """Open a store after checking that its features belong to this model and these frames.

    Args:
        directory: of the store.
        model: directory of the model.
        chat_format: of the model.
        source: the video to compare with; None compares with no video.
        frames: the choice of frames; what it does not state is not compared.

    Raises:
        DataError: if the store is incomplete, or belongs to another model, video or selection of frames.
    """
    store = open_features(directory)
    store.require(**frames.given())
    if source is not None:
        meta = source_meta(source.plan)  # path and time are not compared: a copy on another disk is the same video
        compared = ("source_size", "source_digest", "frames", "frame_times")
        store.require(**{name: meta[name] for name in compared}, pixels=_pixels(source))
    if store.meta.get("model") != model_fingerprint(model, chat_format.feature_weights):
        raise DataError(
            f"{directory}: these features were made by another model than {model} (its vision tower, projector or "
            "image size differ); encode the video again with --save_features"
        )
    return store
