"""The names of the package and the modules that define them; `__init__.py` reads this file."""

from mllm_seqpar.processors.open_flamingo.processing import OpenFlamingoProcessor as OpenFlamingoProcessor

from .configuration import OpenFlamingoConfig as OpenFlamingoConfig
from .conversion import convert as convert
from .modeling import OpenFlamingo as OpenFlamingo
