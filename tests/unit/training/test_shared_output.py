"""Layer: one process. Checkpoints need a directory that all ranks share; the ranks are threads."""

from pathlib import Path

from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.training.checkpoint import require_shared_directory


def errors(folders: list[Path]) -> list[Exception | None]:
    def check(comm: Communicator) -> Exception | None:
        return attempt(lambda: require_shared_directory(comm, folders[comm.rank]))[1]

    return run_loopback(len(folders), check)


def test_directory_that_some_ranks_do_not_share_is_refused_on_all(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
    assert errors([shared] * 3) == [None] * 3
    found = errors([shared, other, shared, other])
    assert all(isinstance(error, ConfigError) for error in found)
    assert all("ranks 1, 3 do not see the files of rank 0" in str(error) for error in found)
    assert not [*shared.iterdir()]


def test_directory_that_rank_0_cannot_write_to_is_an_error_on_all(tmp_path: Path) -> None:
    assert all("No such file or directory" in str(error) for error in errors([tmp_path / "none"] * 2))
