"""How videos are decoded: the number of threads, and the decoder."""

import os
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError, reading

DECODERS = ("pyav", "torchcodec")
"""The decoders of videos: PyAV, or torchcodec (the extra "torchcodec"), which can also decode on a GPU."""

_log = get_logger(__name__)


def decode_threads() -> int:
    """Return the number of decoding threads of one rank: the cores of this process divided by the ranks of this host.

    The number of ranks is the variable LOCAL_WORLD_SIZE, which torchrun, accelerate and our own launcher set.
    """
    return max(1, available_cores() // _local_ranks())


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _local_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def check_decoding(threads: int | None, decoder: str) -> None:
    """Check the options --decode_threads and --decoder of a command, before anything is decoded.

    More threads than cores are allowed, with a warning that they are not faster.

    Raises:
        ConfigError: `threads` below 1, or a decoder that is unknown, not installed, or cannot be loaded.
    """
    check_choice(threads, decoder, "--")
    if decoder == "torchcodec":
        import_torchcodec("--decoder torchcodec")
    cores, ranks = available_cores(), _local_ranks()
    if threads is not None and threads * ranks > max(cores, ranks) and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "--decode_threads %d on %d %s of this machine is more than its %d %s, which decodes no faster; leave it "
            "out for %d",
            *(threads, ranks, "rank" if ranks == 1 else "ranks", cores, "core" if cores == 1 else "cores"),
            decode_threads(),
        )


def check_choice(threads: int | None, decoder: str, prefix: str) -> None:
    """Check the parameters of `read_frames`, or with the prefix "--" the options of a command."""
    if threads is not None and threads < 1:
        name = "--decode_threads" if prefix else "threads"
        raise ConfigError(f"{name}: {threads} is not allowed; give 1 or more")
    if decoder not in DECODERS:
        raise ConfigError(f"{prefix}decoder: {decoder!r} is not allowed; give one of {', '.join(DECODERS)}")


def import_torchcodec(wanted: str) -> Any:
    """Return the module torchcodec.decoders; ConfigError if it is not installed or cannot be loaded."""
    # An installed torchcodec may not find FFmpeg or the libraries of CUDA.
    with reading("torchcodec cannot be loaded", "install FFmpeg, or use the decoder pyav", ConfigError):
        return optional_import("torchcodec.decoders", extra="torchcodec", needed_for=wanted)
