"""Errors that a caller can act on. Each message says what was found, what is allowed and what to do."""


class SeqParError(ValueError):
    """Base of all errors that this package raises about its inputs."""


class ConfigError(SeqParError):
    """An option, or a combination of options, that does not exist or cannot work here."""


class AdapterError(SeqParError):
    """A model without an adapter, a model that is patched already, or one whose modules differ from its adapter's."""


class MaskError(SeqParError):
    """A malformed mask, or one that a model family or a kernel cannot express."""


class ShapeError(SeqParError):
    """Tensors whose shapes, dtypes or devices do not match each other or the group."""


class AgreementError(SeqParError):
    """Ranks of one group that were given different configurations, shapes or numbers of frames."""


class DataError(SeqParError):
    """A training file, feature store or checkpoint that is malformed or does not match the model."""


class VideoError(SeqParError):
    """A video that cannot be read or has no frames."""


class TransferError(RuntimeError):
    """A transfer between ranks that failed or timed out, usually because another rank has ended."""


class DivergedError(RuntimeError):
    """An error of one rank while the other ranks wait for it in a collective; the ranks cannot agree on it."""


PASSED = (SeqParError, MemoryError)
"""Exceptions that are not about a file. Any other one that a library raises while it reads a file becomes our own error
with the name of the file, because no list of the exceptions of other libraries is complete."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its `repr` if the message is empty."""
    return next(iter(str(error).strip().splitlines()), repr(error))
