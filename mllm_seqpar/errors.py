"""Errors that a caller can act on. Each message says what was found, what is allowed and what to do."""

import difflib
import errno
import os
import re
from collections import abc
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb


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


class NonFiniteLogitsError(SeqParError):
    """A model whose numbers are NaN or infinite, so that they are no token, choice, likelihood or loss."""


class LengthError(DataError):
    """A text that is longer than the model's context."""


class VideoError(SeqParError):
    """A video that cannot be read or has no frames."""


class TransferError(RuntimeError):
    """A transfer between ranks that failed or timed out, usually because another rank has ended."""


class DivergedError(RuntimeError):
    """An error of one rank while the other ranks wait for it in a collective; the ranks cannot agree on it."""


IMAGE_DIMS: dict[str, int | None] = {"channels": None, "height": None, "width": None}
"""The last dimensions of pixels, for `require_shape`."""


def require_shape(name: str, shape: abc.Sequence[int] | None, note: str = "", **dims: int | None) -> None:
    """Raise ShapeError unless a tensor has these dimensions in this order; None is one of any size.

    A `shape` of None is that of a tensor that is missing.

    The message states the sizes, and the names of dimensions of any size: "x has shape (3, 4); expected (frames, 2)".
    `note` ends it.
    """
    fits = shape is not None and len(shape) == len(dims)
    if not fits or any(size not in (None, x) for size, x in zip(dims.values(), shape or (), strict=True)):
        expected = ", ".join(dim.replace("_", " ") if size is None else str(size) for dim, size in dims.items())
        found = "is missing" if shape is None else f"has shape {tuple(shape)}"
        raise ShapeError(f"{name} {found}; expected ({expected}){note}")


def require_one_of(
    name: str, value: object, allowed: abc.Iterable[object], note: str = "", kind: type[SeqParError] = ConfigError
) -> None:
    """Raise an error of class `kind` unless an option has an allowed value; `note` ends the message."""
    allowed = list(allowed)
    if value not in allowed:
        raise kind(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}{note}")


def require_distinct(name: str, numbers: abc.Sequence[int], first: int, last: int, note: str) -> None:
    """Raise ConfigError unless a field lists distinct numbers from `first` to `last`; `note` ends the message."""
    if len(set(numbers)) != len(numbers) or not all(first <= number <= last for number in numbers):
        raise ConfigError(f"{name} is {list(numbers)}; expected distinct numbers from {first} to {last}{note}")


PASSED = (SeqParError, MemoryError)
"""Exceptions that are not about a file. Any other one that a library raises while it reads a file becomes our own error
with the name of the file, because no list of the exceptions of other libraries is complete."""


def did_you_mean(name: str, known: abc.Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known one, or nothing."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


_LIBRARIES = ("transformers", "accelerate", "peft", "tokenizers", "huggingface_hub")
_LONG = 300
"""Characters of a message of a library that are quoted; of a longer one, its last sentence."""


def library_fault(error: BaseException) -> str | None:
    """Return in one line what an error says that transformers, or a library like it, raised; None for other errors.

    What such a library calls counts as its own, such as a package that it needs for an option, but not this package.
    """
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    ours_or_theirs = [name for name in names if name == __package__ or name in _LIBRARIES]
    if not ours_or_theirs or ours_or_theirs[-1] == __package__:
        return None
    text = " ".join(str(error).split()) or repr(error)
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)
    said = text if len(text) <= _LONG else sentences[-1][-_LONG:]
    is_sentence = isinstance(error, (ValueError, OSError, ImportError, RuntimeError))
    return said if is_sentence else f"{type(error).__name__}: {said}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its `repr` if the message is empty."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def reason(error: BaseException) -> str:
    """Return why an operation failed, without the errno and the path that an OSError or an FFmpeg error repeats."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return getattr(error, "strerror", None) or first_line(error)


@contextmanager
def translated(make: abc.Callable[[str], SeqParError]) -> abc.Iterator[None]:
    """Raise ``make(why)`` for whatever a library raises inside the context, except for `PASSED`."""
    try:
        yield
    except PASSED:
        raise
    except Exception as error:
        raise make(reason(error)) from error


@contextmanager
def placed(place: str, kind: type[SeqParError], raised: type[SeqParError] | None = None) -> abc.Iterator[None]:
    """Put `place` before the text of an error of class `kind`, then one of class `raised`, by default `kind`."""
    try:
        yield
    except kind as error:
        raise (raised or kind)(f"{place}: {error}") from error


def reading(what: str, remedy: str, kind: type[SeqParError] = DataError) -> AbstractContextManager[None]:
    """Return a context in which whatever a library raises becomes an error of class `kind`: what (why); remedy."""
    return translated(lambda why: kind(f"{what} ({why}); {remedy}"))


@contextmanager
def writing(where: object, what: str, remedy: str, kind: type[SeqParError] = DataError) -> abc.Iterator[None]:
    """Raise an error of class `kind` if `what` cannot be written inside the context, whichever library writes it.

    `where` is a path, or an option with its value. If `what` is empty, the path itself is what is written.
    """
    try:
        yield
    except SeqParError:
        raise
    except BaseException as error:  # CheckpointException of torch is no Exception
        fault = (error.strerror or str(error)) if isinstance(error, OSError) else write_fault(error)
        if fault is None:
            raise
        subject = f"{where}: {what}".rstrip()
        raise kind(f"{subject} cannot be written ({fault}); {remedy}") from error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def write_fault(error: BaseException) -> str | None:
    """Return why a file could not be written, if that is the cause of an error of any library; else None.

    Libraries in Rust and torch.distributed.checkpoint raise errors of their own, which quote the operating system's.
    """
    text = str(error)
    for number in _FULL:
        if os.strerror(number) in text:
            return os.strerror(number)
    if "inline_container" in text and "unexpected pos" in text:  # of torch.save, after an incomplete write
        return f"a write was incomplete; probably {os.strerror(errno.ENOSPC).lower()}"
    cause = error.__cause__ or error.__context__
    return None if cause is None else write_fault(cause)
