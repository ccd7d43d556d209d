"""Layer: one process, ranks as threads. Which samples a step has; bad media are replaced, or stop all ranks."""

import json
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import av
import pytest
import torch

from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.comm.base import Subgroup
from mllm_seqpar.data import ChatBatch, ChatDataset
from mllm_seqpar.errors import AgreementError, ConfigError, DataError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.training import batches as batches_module
from mllm_seqpar.training.batches import READ_AHEAD_BYTES, BatchReader, SampleOrder
from mllm_seqpar.training.stored_tower import TowerRows, has_outputs
from model_copies import tiny_model
from tiny_models.mplug_owl3 import IMAGE_SIZE, IMAGE_TOKEN, tiny_tokenizer

SAMPLES, FRAMES = 9, 12
HALF, MISSING, EMPTY = 2, 5, 6
"""Samples whose video is damaged after its first frames, so that not all ranks find it; missing; and empty."""

STEP = 7
"""From a bad sample to its first replacement."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    videos = make_needle_videos(root, SAMPLES, frames=(FRAMES, FRAMES), rate=2)
    rows = [video.sample(root) for video in videos]
    for row in rows:
        # Fewer than all are chosen by the index of the file, also where frames are missing.
        row["messages"][0]["content"][0]["num_frames"] = FRAMES - 1
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(videos[MISSING].path).unlink()
    Path(videos[EMPTY].path).write_bytes(b"")
    cut_the_end(Path(videos[HALF].path))
    return root


def cut_the_end(path: Path) -> None:
    """Remove more than half of the frames of a video whose index comes first, so that it opens and they are damaged."""
    whole = path.with_suffix(".whole.mp4")
    with av.open(str(path)) as source, av.open(str(whole), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    with av.open(str(whole)) as file:
        first_removed = [packet.pos for packet in file.demux(video=0) if packet.size][FRAMES // 2 - 1]
    path.write_bytes(whole.read_bytes()[:first_removed])
    whole.unlink()


def opened(path: Path, **options: Any) -> ChatDataset:
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
    return ChatDataset(path, processor, **options)


def order_of(dp: int = 1, micro_batch: int = 1, seed: int = 1) -> SampleOrder:
    return SampleOrder(samples=SAMPLES, global_batch=4, micro_batch=micro_batch, dp=dp, seed=seed)


def train(
    path: Path,
    world: int,
    sp: int,
    *,
    on_bad_media: str = "skip",
    micro_batch: int = 1,
    first_step: int = 0,
    steps: int = 3,
    then: Callable[[Any, Any], Any] = lambda batch, reader: batch.samples,
    ahead_bytes: int = READ_AHEAD_BYTES,
) -> list[list[Any]]:
    """Return for each rank what `then` makes of each micro-batch, or the error that ended the run."""

    def rank(comm: Communicator) -> list[Any]:
        order = order_of(world // sp, micro_batch)
        group = Subgroup(comm, range(comm.rank // sp * sp, comm.rank // sp * sp + sp))
        reader = BatchReader(opened(path, on_bad_media=on_bad_media), group, comm, ahead_bytes)
        batches = reader.read_all(order.passes(comm.rank // sp, first_step, steps), order.micro_batches)
        made, error = attempt(lambda: [then(batch, reader) for batch in batches])
        return made if error is None else [error]

    return run_loopback(world, rank, timeout=30)


def by_step(results: list[list[Any]], sp: int) -> list[list[int]]:
    """Return the samples of each optimizer step, in the order in which one rank with micro-batches of 1 has them."""
    groups = results[::sp]
    merged = [s for parts in zip(*groups, strict=True) for samples in parts for s in samples]
    return [merged[start : start + 4] for start in range(0, len(merged), 4)]


def test_order_of_samples_does_not_depend_on_the_groups() -> None:
    def step(order: SampleOrder, number: int) -> list[int]:
        passes = [order.passes(group, number, number + 1) for group in range(order.dp)]
        return [sample for parts in zip(*passes, strict=True) for samples in parts for sample in samples]

    one, two = (SampleOrder(samples=21, global_batch=8, micro_batch=2, dp=dp, seed=3) for dp in (1, 2))
    assert all(step(one, number) == step(two, number) for number in range(5))
    assert (one.steps_per_epoch, one.micro_batches, two.micro_batches) == (2, 4, 2)
    epochs = [step(one, first) + step(one, first + 1) for first in (0, 2)]
    assert all(len(set(samples)) == 16 for samples in epochs) and epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("samples", "dp", "message"),
    [
        (21, 3, "--global_batch_size 8 is not a multiple of 6 = --per_device_train_batch_size 2"),
        (7, 2, "a step has 8 samples .* more than the 7 samples"),
    ],
)
def test_steps_that_cannot_be_filled_are_refused(samples: int, dp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleOrder(samples=samples, global_batch=8, micro_batch=2, dp=dp, seed=3)


def test_replacements_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    path, bad = folder / "train.jsonl", {HALF, MISSING, EMPTY}
    plain = [sample for (sample,) in order_of().passes(0, 0, 3)]
    following = [[(sample + number * STEP) % SAMPLES for number in range(SAMPLES)] for sample in plain]
    wanted = [next(sample for sample in candidates if sample not in bad) for candidates in following]
    expected = by_step(train(path, 1, 1), 1)
    assert sum(expected, []) == wanted and bad & set(plain)
    for world, sp, micro_batch in ((2, 2, 1), (3, 3, 2), (2, 1, 1), (4, 2, 2)):
        results = train(path, world, sp, micro_batch=micro_batch)
        assert by_step(results, sp) == expected
        assert all(results[rank] == results[rank // sp * sp] for rank in range(world))


def test_neighbours_which_may_share_a_bad_video_have_different_replacements(folder: Path) -> None:
    reader = BatchReader(opened(folder / "train.jsonl", on_bad_media="skip"), "self", "self")
    first, second = (reader.read([sample]).samples for sample in (MISSING, EMPTY))
    assert EMPTY == MISSING + 1 and first != second
    reader.skipped |= dict.fromkeys(range(3, SAMPLES), "")  # a video with as many questions as are tried
    with mock.patch.object(batches_module, "MOST_REPLACEMENTS", SAMPLES - 4):
        assert reader.read([3]).samples[0] < 3


def test_resumed_run_has_the_batches_of_an_uninterrupted_one(folder: Path) -> None:
    def pixels(batch: Any, reader: Any) -> Any:
        return batch.samples, batch.arguments["pixel_values"].double().sum().item(), batch.chat.targets

    whole = train(folder / "train.jsonl", 2, 2, then=pixels)
    resumed = train(folder / "train.jsonl", 2, 2, first_step=2, then=pixels)
    assert [rows[8:] for rows in whole] == resumed and len(resumed[0]) == 4


def test_limit_of_read_ahead_changes_no_batch(folder: Path) -> None:
    path = folder / "train.jsonl"
    assert train(path, 2, 1, ahead_bytes=1) == train(path, 2, 1)


@pytest.mark.parametrize("limit", [READ_AHEAD_BYTES, 1])
def test_frames_are_decoded_ahead_up_to_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    received, ahead, several = [0], [], threading.Event()
    decode = BatchReader.load

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        ahead.append(len(ahead) + 1 - received[0])
        if len(ahead) == 3:
            several.set()
        return decode(self, *args, **options)

    monkeypatch.setattr(BatchReader, "load", counted)
    reader = BatchReader(opened(folder / "train.jsonl", on_bad_media="skip"), "self", "self", limit)
    with closing(reader.read_all([[0]] * 5)) as batches:
        for _ in batches:
            received[0] += 1
            if limit > 1 and received[0] == 1:
                assert several.wait(30)  # two more are decoded while the first one is used
    # The next one may begin after a micro-batch is released, and before it is received.
    assert len(ahead) == 5 and (limit > 1 or max(ahead) <= 2)


def test_known_bad_samples_are_loaded_once_and_within_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[int, ...]] = []
    received, load = threading.Event(), BatchReader.open

    def slow(self: BatchReader, samples: tuple[int, ...]) -> ChatBatch:
        if threading.current_thread().name.startswith("open"):
            received.wait(1)  # a batch that does not wait for its turn is received first
        loads.append(samples)
        return load(self, samples)

    reader = BatchReader(opened(folder / "train.jsonl", on_bad_media="skip"), "self", "self")
    first = [batch.samples for batch in reader.read_all([(EMPTY,)] * 5)]
    assert list(reader.skipped) == [EMPTY]
    monkeypatch.setattr(BatchReader, "open", slow)
    again = []
    for batch in reader.read_all([(EMPTY,)] * 5):
        received.set()
        again.append(batch.samples)
    assert again == first == loads == [((EMPTY + STEP) % SAMPLES,)] * 5


def test_ranks_that_stop_early_read_on_later(folder: Path) -> None:
    def rank(comm: Communicator) -> list[Any]:
        reader = BatchReader(opened(folder / "train.jsonl", on_bad_media="skip"), comm, comm)
        found = []
        for _ in range(4):
            with closing(reader.read_all(order_of().passes(0, 0, 3), 4)) as batches:
                found.append(next(batches).samples)
        return found

    first, second = run_loopback(2, rank, timeout=30)
    assert first == second and len(set(first)) == 1


def test_skipped_samples_are_logged_once_with_file_and_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = folder / "train.jsonl"
    (*_, counts), *_ = train(path, 2, 2, steps=6, then=lambda batch, reader: dict(reader.skipped))
    assert sorted(counts) == [HALF, MISSING, EMPTY]
    for sample, text in ((HALF, "cannot be decoded"), (MISSING, "no such file"), (EMPTY, "the file is empty")):
        assert counts[sample].startswith(f"{path}:{sample + 1}: ") and text in counts[sample]
        assert sum(f"so far: {path}:{sample + 1}: " in record.getMessage() for record in caplog.records) == 1


def test_bad_media_stop_all_ranks_at_one_micro_batch(folder: Path) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:6: .*no such file"):
        train(folder / "train.jsonl", 1, 1, on_bad_media="fail")
    rows = (folder / "train.jsonl").read_text().splitlines()
    good = [row for number, row in enumerate(rows) if number not in (MISSING, EMPTY)]
    (folder / "half.jsonl").write_text("\n".join([*good, good[0], good[0]]))
    results = train(folder / "half.jsonl", 4, 2, on_bad_media="fail")
    message = f"{folder / 'half.jsonl'}:{HALF + 1}: "
    # Both ranks of the sample's group have frames of the part that is missing.
    assert [type(rank[0]).__name__ for rank in results].count("MediaError") == 2
    assert sum(isinstance(rank[0], AgreementError) for rank in results) == 2
    assert all(message in str(rank[0]) and len(rank) == 1 for rank in results)


@pytest.mark.parametrize(("most", "tried"), [(100, SAMPLES), (3, 4)])
def test_search_for_a_replacement_ends(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, tried: int) -> None:
    rows = (folder / "train.jsonl").read_text().splitlines()
    (folder / "all_bad.jsonl").write_text("\n".join([rows[MISSING]] * SAMPLES))
    monkeypatch.setattr(batches_module, "MOST_REPLACEMENTS", most)
    results = train(folder / "all_bad.jsonl", 2, 2)
    assert all(f"{tried} samples in a row cannot be read" in str(rank[0]) for rank in results)
    assert "all_bad.jsonl:" in str(results[0][0]) and "no such file" in str(results[0][0])


def test_other_errors_of_one_rank_are_raised_on_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = BatchReader.load

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if self._comm.rank == 1:
            raise MemoryError("no memory")
        return decode(self, *args, **options)

    monkeypatch.setattr(BatchReader, "load", failing)
    first, second = train(folder / "train.jsonl", 2, 2)
    assert isinstance(second[0], MemoryError)
    assert "reading the training data: rank 1: MemoryError: no memory" in str(first[0])


def test_features_are_used_only_if_all_ranks_have_them(folder: Path) -> None:
    """Under FSDP all ranks run the tower, or none does."""

    def rank(comm: Communicator) -> list[bool]:
        class Stored:
            def rows(self, batch: Any, shard: Any, read: bool) -> TowerRows:
                found = comm.rank == 0 or not batch.places[0].endswith("train.jsonl:1")
                return TowerRows((), torch.empty(0) if read and found else None)

        reader = BatchReader(opened(folder / "train.jsonl", on_bad_media="skip"), comm, comm, features=Stored())  # type: ignore[arg-type]
        return [has_outputs(batch.arguments) for batch in reader.read_all([[0], [1], [0]])]

    assert run_loopback(2, rank, timeout=30) == [[False, True, False]] * 2


def test_errors_of_a_processor_name_the_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("unexpected size")

    monkeypatch.setattr(MPlugOwl3ImageProcessor, "__call__", failing)
    for (error,) in train(folder / "train.jsonl", 2, 2):
        assert "train.jsonl:" in str(error) and "ValueError: unexpected size" in str(error)


TEXT = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    videos = make_needle_videos(tmp_path / "videos", 3, frames=(2, 5))
    rows = [*(video.sample(tmp_path) for video in videos), TEXT]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chat.jsonl"


def read(dataset: ChatDataset, *samples: int) -> ChatBatch:
    return BatchReader(dataset, "self", "self").read(samples)


def test_batch_has_all_arguments_of_forward(chat_file: Path) -> None:
    batch = read(opened(chat_file), 0, 3)
    inputs = batch.arguments
    assert inputs["pixel_values"].shape == (batch.frames, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert "visual_shard" not in inputs
    assert int((inputs["input_ids"] == IMAGE_TOKEN).sum()) == batch.frames
    assert batch.targets == int((inputs["labels"][:, 1:] != -100).sum()) > 0
    assert tiny_model()(**inputs).loss.isfinite()


def test_digest_covers_text_and_media(chat_file: Path) -> None:
    def digest() -> str:
        return opened(chat_file).content_digest()

    first = digest()
    assert digest() == first
    videos = sorted((chat_file.parent / "videos").iterdir())
    with videos[1].open("ab") as video:
        video.write(b"more")
    second = digest()
    chat_file.write_text(chat_file.read_text().replace("hello.", "hullo."))
    assert len({first, second, digest()}) == 3


def test_unusable_samples_and_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(TEXT) + "\n")
    with pytest.raises(ConfigError, match="on_bad_media: 'ignore' is not allowed; give fail or skip"):
        opened(tmp_path / "chat.jsonl", on_bad_media="ignore")
    with pytest.raises(DataError, match="max_length = 5"):
        read(opened(tmp_path / "chat.jsonl", max_length=5), 0)
