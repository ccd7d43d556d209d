"""Layer: one process. Ids on the Hub stand for directories of its cache; without a network, the error says so."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from mllm_seqpar.chats.records import open_records
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.digests import model_digest, model_fingerprint
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.planner.descriptions import find_file
from mllm_seqpar.planner.model_sizes import read_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_snapshot(cache: Path, kind: str, name: str) -> Path:
    """Return the folder of a snapshot in the Hub's published cache layout, with the reference of its branch."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_model_of_an_id_is_that_of_its_directory(cache: Path, inference_files: Path) -> None:
    snapshot = cached_snapshot(cache, "model", "someone/tiny-owl")
    (cache / "blobs").mkdir()
    for number, file in enumerate((inference_files / "gated").iterdir()):
        (cache / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(cache / "blobs" / str(number))
    directory = str(inference_files / "gated")
    assert local_directory("someone/tiny-owl") == local_directory(f"someone/tiny-owl@{COMMIT}") == str(snapshot)
    loaded, expected = load_model("someone/tiny-owl"), load_model(directory)
    assert all(torch.equal(x, expected.state_dict()[name]) for name, x in loaded.state_dict().items())
    assert load_processor("someone/tiny-owl").tokenizer.get_vocab() == load_processor(directory).tokenizer.get_vocab()
    assert model_digest("someone/tiny-owl") == model_digest(directory)
    assert model_fingerprint("someone/tiny-owl") == model_fingerprint(directory)


def test_planner_reads_the_config_alone(cache: Path, inference_files: Path) -> None:
    config = cached_snapshot(cache, "model", "someone/tiny-owl") / "config.json"
    config.write_bytes((inference_files / "gated/config.json").read_bytes())
    assert find_file("model", "someone/tiny-owl") == config
    sizes = read_model("someone/tiny-owl")
    assert sizes.text == read_model(inference_files / "gated").text
    with pytest.raises(ConfigError, match="someone/none: no such directory here"):
        find_file("model", "someone/none")


def test_data_set_of_an_id_is_opened(cache: Path) -> None:
    (cached_snapshot(cache, "dataset", "someone/chats") / "train.jsonl").write_text('{"messages": []}\n')
    assert open_records("someone/chats").record(0) == {"messages": []}


def test_id_that_is_not_cached_needs_the_network(cache: Path) -> None:
    message = "someone/unknown: no such directory here, and as the id of a model on the Hub it cannot be downloaded: "
    with pytest.raises(ConfigError, match=message):
        load_model("someone/unknown")
    with pytest.raises(ConfigError, match=r"someone/chats: .* id of a dataset .*Without a network, download it"):
        open_records("someone/chats")


def test_paths_are_never_looked_up(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "runs/model").mkdir(parents=True)
    for name in ("runs/model", "./runs/none", "/runs/none", "a/b/c", "none", "~/x"):
        assert local_directory(name) == name
    for name in ("./runs/none", "data/train.jsonl"):
        with pytest.raises(DataError, match="(?i)no such file or directory"):
            open_records(name)
