"""Short values by which data are compared: digests name files and texts, and fingerprints travel between ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def digest_of(content: str | bytes) -> str:
    """Return the digest of a text or of bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=16).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return a digest of the size and of samples of a file, 32 hexadecimal digits."""
    digest = hashlib.blake2b(str(os.path.getsize(path)).encode(), digest_size=16)
    for sample in file_samples(path):
        digest.update(sample)
    return digest.hexdigest()


def file_samples(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield evenly spaced parts of a file, so that a long video or a large model is not read whole."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def fingerprint(text: str) -> int:
    """Return 63 bits of a hash of `text`, to compare texts across ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
