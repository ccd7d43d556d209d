"""Shared set-up of all tests."""

import atexit
import fcntl
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from browser import Chromium

# torch is imported inside functions: the process that starts the workers of pytest-xdist would import it before them.
gc.disable()  # until the test modules are imported, see pytest_collection_finish
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # runs last; to destroy what a worker has imported and built takes seconds

# Tests use local files and random weights only; a look-up on a hub would make them depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton reads this when it is imported: without an NVIDIA driver, its programs run in its interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set[int]()
"""The cores of the session; none where processes cannot be kept on some of them."""

LAYERS = ("pure Python", "one process", "gloo ranks", "real launch", "GPU")
"""The layers that follow "Layer: " at the start of a test module's docstring, from the cheapest to the slowest."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the cheapest layer first; a worker of pytest-xdist runs the slowest first, so that all workers end together.

    The order within a layer does not change.
    """

    items.sort(key=layer_of, reverse=hasattr(config, "workerinput"))


def layer_of(item: pytest.Item | pytest.Module) -> int:
    """Return the index in `LAYERS` of a test or of a module."""
    layer = (getattr(getattr(item, "module", None), "__doc__", None) or "").split(".")[0]
    return max((index for index, name in enumerate(LAYERS) if name in layer), default=0)


def pytest_collection_finish() -> None:
    import torch

    # Worker processes and the test process share few cores; more threads than cores only slow both down.
    torch.set_num_threads(1)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _collections_leave_out_what_stays() -> None:
    """Let garbage collections leave out what earlier modules imported and built, a million objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    if "ranks" in sys.modules:
        sys.modules["ranks"].close_pool()
    gc.freeze()  # pytest then collects garbage five times
    if "triton" in sys.modules:  # it reports objects that no collection at the exit can reach as leaks
        atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _independent_of_earlier_cases() -> Iterator[None]:
    """Seed torch before each case, and reset the state that a case may leave in the process."""
    import torch

    from ranks_worker import reset_global_state

    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for each device that is not initialized
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    yield
    reset_global_state()


@pytest.fixture(autouse=True, scope="module")
def _threads_share_a_core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the threads of tests of one process on one core. On several, passing the GIL on takes half of the time.

    Test processes that run at the same time use different cores, as long as there are any, which they lock.
    """
    if layer_of(request.node) > LAYERS.index("one process") or not CORES:
        yield
        return
    with ExitStack() as locks:
        for core in sorted(CORES):
            lock = locks.enter_context(open(tmp_path_factory.getbasetemp().parent / f"core-{core}", "w"))
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        os.sched_setaffinity(0, {core})
        yield
        os.sched_setaffinity(0, CORES)


@pytest.fixture(autouse=True, scope="session")
def _metadata_of_packages_are_read_once() -> Iterator[None]:
    from ranks_worker import packages_read_once

    with packages_read_once():
        yield


@pytest.fixture(scope="session")
def openai() -> Any:
    """The package of the client, whose import takes more than a second."""
    return pytest.importorskip("openai", reason="openai is not installed (extra test)")


@pytest.fixture
def load_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines have copies of models, which ranks that are threads may load together."""
    import model_copies

    monkeypatch.setattr("mllm_seqpar.inference.engine.load_model", model_copies.load_model)


def save_tiny_model(path: Path, gate: str | None, seed: int = 0) -> None:
    from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
    from model_copies import tiny_model
    from tiny_models.mplug_owl3 import tiny_tokenizer

    tiny_model(gate, seed).save_pretrained(path)
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer()).save_pretrained(path)


@pytest.fixture(scope="session")
def inference_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models `gated`, `fused` and `other` with processors; `clip.mp4` and `twin.mp4` of 100 frames."""
    from mllm_seqpar.chats.needle import make_needle_videos

    folder = tmp_path_factory.mktemp("inference")
    for name, gate, seed in (("gated", "per_head", 0), ("fused", None, 0), ("other", "per_head", 1)):
        save_tiny_model(folder / name, gate, seed)
    for video, name in zip(make_needle_videos(folder, 2, frames=(100, 100), rate=25), ("clip", "twin"), strict=True):
        Path(video.path).rename(folder / f"{name}.mp4")
    return folder


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    of_module = CORES and os.sched_getaffinity(0)
    if of_module:  # the browser outlives the module whose test starts it, see _threads_share_a_core
        os.sched_setaffinity(0, CORES)
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    if of_module:
        os.sched_setaffinity(0, of_module)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def training_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny `model`, `eval.jsonl`, and `train.jsonl` with 10 videos of 1 to 7 frames and two chats without videos."""
    from mllm_seqpar.chats.needle import make_needle_videos

    folder = tmp_path_factory.mktemp("training")
    save_tiny_model(folder / "model", None)
    rows: list = [video.sample(folder) for video in make_needle_videos(folder / "videos", 10, frames=(1, 7))]
    text = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello, hello"}]}
    rows[3:3] = rows[8:8] = [text]
    for name, part in (("train", rows), ("eval", rows[:5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder
