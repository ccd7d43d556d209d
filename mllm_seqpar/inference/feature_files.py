"""An encoded video on disk: written by the ranks that encoded it, read by any number of others, for the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.collective_check import check_collectively
from mllm_seqpar.data.chat_family import ChatFamily
from mllm_seqpar.data.features import FeatureStore, model_fingerprint, open_features, save_features, source_meta
from mllm_seqpar.data.sources import VideoSource
from mllm_seqpar.errors import DataError
from mllm_seqpar.sharding import FrameShard, frame_range

from .encoding import EncodedVideo

SAMPLING = ("fps", "num_frames", "max_frames")
"""The options that say which frames of a video are used."""


def save_video(directory: str, video: EncodedVideo, comm: Communicator, meta: Mapping[str, Any]) -> None:
    """Writes the features of an encoded video; every rank its own. Returns when all are written.

    Args:
        directory: made if it does not exist, on a file system that all ranks see.
        video: the features.
        comm: the group that encoded it.
        meta: what they were made of; rank 0's is written.

    Raises:
        DataError: this rank cannot write; AgreementError: another rank cannot.
    """
    origin = json.loads(comm.gather_texts(json.dumps(dict(meta)))[0])

    def write() -> None:
        try:
            save_features(
                directory,
                video.features,
                start=video.shard.start,
                total=video.shard.total,
                rank=comm.rank,
                world=comm.size,
                meta=origin,
            )
        except OSError as error:
            raise DataError(f"{directory}: the features cannot be written: {error}") from error

    check_collectively(comm, "saving the features", write)


def load_video(
    store: FeatureStore, family: ChatFamily, comm: Communicator, device: torch.device, dtype: torch.dtype
) -> EncodedVideo:
    """Reads this rank's frames of a store, and no others.

    Raises:
        DataError: the features are of another dtype than the model, so that answers would be others.
    """
    if store.dtype != dtype:
        have, need = (str(kind).removeprefix("torch.") for kind in (store.dtype, dtype))
        raise DataError(
            f"{store.directory}: these features are {have} and the model runs in {need}; use --dtype {have}, or encode "
            "the video again with --save-features"
        )
    own = frame_range(store.total_frames, comm)
    shard = FrameShard(own.start, own.stop, store.total_frames)
    frames = family.stored_frames(store.total_frames, store.meta)
    return EncodedVideo(store.read(own.start, own.stop, device), shard, frames)


def origin(source: VideoSource, model: str, family: ChatFamily, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What features of `source` made by the model in directory `model` depend on; written into their store."""
    return {
        **source_meta(source.plan),
        **{name: sampling[name] for name in SAMPLING},
        **family.frame_metadata(source),
        "model": model_fingerprint(model, family.feature_weights),
    }


def open_store(
    directory: str, model: str, family: ChatFamily, source: VideoSource | None, sampling: Mapping[str, Any]
) -> FeatureStore:
    """Opens a store after checking that it was made by this model and of these frames.

    Args:
        directory: of the store.
        model: directory of the model.
        family: of the model.
        source: the video that it should be of; None to take the store's word.
        sampling: the options of `SAMPLING`; those that are None are not compared.

    Raises:
        DataError: no complete store, or one of another model, video or choice of frames.
    """
    store = open_features(directory)
    store.require(**{name: sampling[name] for name in SAMPLING if sampling[name] is not None})
    if source is not None:
        made = source_meta(source.plan)  # not by path and time: a copy on another disk is the same video
        store.require(**{name: made[name] for name in ("source_size", "frames", "frame_times")})
    fingerprint = model_fingerprint(model, family.feature_weights)
    if store.meta.get("model") != fingerprint:
        raise DataError(
            f"{directory}: these features were made by another model than {model} (its vision tower, projector or "
            "picture size differ); encode the video again with --save-features"
        )
    return store
