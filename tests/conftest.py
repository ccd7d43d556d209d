"""Shared set-up of all tests."""

import os

import pytest
import torch

from ranks import close_pool

# Worker processes and the test process share few cores; more threads than cores only slow both down.
torch.set_num_threads(1)

# Tests use local files and random weights only; a look-up on a hub would make them depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


LAYERS = ("pure Python", "one process", "gloo ranks", "real launch", "GPU")
"""What a test module's docstring begins with, after "Layer: ", from the cheapest on."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The cheapest tests come first; within a layer the order stays.

    In a half of the whole suite the longest come first, else one half would end with them while the other has nothing.
    """
    items.sort(
        key=lambda item: _cost((getattr(item, "module", None) and item.module.__doc__) or ""),
        reverse=hasattr(config, "workerinput"),
    )


def _cost(docstring: str) -> int:
    layer = docstring.split(".")[0]
    return max((i for i, name in enumerate(LAYERS) if name in layer), default=0)


def pytest_sessionfinish() -> None:
    close_pool()


@pytest.fixture(autouse=True)
def _same_numbers_in_every_order() -> None:
    """A case's random numbers do not depend on which cases ran before it."""
    torch.manual_seed(0)
