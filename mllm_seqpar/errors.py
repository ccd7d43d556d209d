"""The errors a caller can act on. Each message says what was found, what is allowed and what to do."""


class SeqParError(ValueError):
    """Base of all errors that this package raises about its inputs."""


class ConfigError(SeqParError):
    """An option, or a combination of options, that does not exist or cannot work here."""


class AdapterError(SeqParError):
    """A model that no adapter knows, that is patched already, or whose modules are not where its adapter looks."""


class MaskError(SeqParError):
    """A mask that is malformed, or of a form that a model family or a kernel cannot express."""


class ShapeError(SeqParError):
    """Tensors whose shapes, dtypes or devices do not fit each other or the group."""


class AgreementError(SeqParError):
    """Ranks of one group that passed different configurations, shapes or numbers of frames."""


class DataError(SeqParError):
    """A training file, a feature store or a checkpoint that cannot be used as it is."""


class VideoError(SeqParError):
    """A video that cannot be read, or has nothing in it."""


class TransferError(RuntimeError):
    """A transfer between ranks that failed or timed out; usually another rank has ended."""
