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


def pytest_sessionfinish() -> None:
    close_pool()


@pytest.fixture(autouse=True)
def _same_numbers_in_every_order() -> None:
    """A case's random numbers do not depend on which cases ran before it."""
    torch.manual_seed(0)
