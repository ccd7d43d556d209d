"""Layer: one process, real files. One data set in every form of storage gives the same text and the same pixels."""

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import write_clip
from PIL import Image

from mllm_seqpar.data import ChatDataset, chat_family, load_local_images
from mllm_seqpar.data.downloads import CACHE_VARIABLE
from mllm_seqpar.data.formats import open_records
from mllm_seqpar.data.needle import make_tokenizer
from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor

TEXTS = {"a.mp4": "Red.", "b.mkv": "Blue.", "1.png": "Green."}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("media")
    write_clip(root / "a.mp4")
    write_clip(root / "b.mkv", frames=40)
    Image.linear_gradient("L").resize((40, 24)).convert("RGB").save(root / "1.png")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def processor() -> Any:
    tokenizer = make_tokenizer(["What is it? Describe the image video."])
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tokenizer, cut_enable=False)


def kind(name: str) -> str:
    return "image" if name.endswith("png") else "video"


def expected(media: Path, processor: Any, folder: Path) -> list[Any]:
    """Return the batches of the data set as chats in JSONL beside the media."""
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": kind(name), "path": name}, {"type": "text", "text": "What is it?"}],
                },
                {"role": "assistant", "content": answer},
            ]
        }
        for name, answer in TEXTS.items()
    ]
    (folder / "reference.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return batches(ChatDataset(folder / "reference.jsonl", processor, media_root=media), processor)


def batches(data: ChatDataset, processor: Any) -> list[Any]:
    found = []
    for index in (2, 0, 1):  # in any order
        batch = data.batch([index])
        found.append((batch, load_local_images(batch, range(batch.frames), chat_family(processor))[0]))
    return found


def check_equal(path: Path | str, processor: Any, reference: list[Any], **options: Any) -> ChatDataset:
    data = ChatDataset(path, processor, **options)
    for (batch, pixels), (other, other_pixels) in zip(batches(data, processor), reference, strict=True):
        assert torch.equal(batch.input_ids, other.input_ids) and torch.equal(batch.labels, other.labels)
        assert torch.equal(pixels, other_pixels)
    assert ChatDataset(path, processor, **options).digest == data.digest
    return data


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_llava_list_with_paths_from_another_folder(tmp_path: Path, media: Path, processor: Any) -> None:
    rows = [
        {
            "id": str(number),
            kind(name): name,
            "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": answer}],
        }
        for number, (name, answer) in enumerate(TEXTS.items())
    ]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    data = check_equal(tmp_path / "llava.json", processor, expected(media, processor, tmp_path), media_root=media)
    assert data[1].place == f"{tmp_path / 'llava.json'}, record 2"
    with pytest.raises(DataError, match=r"llava.json, record \d: .*a.mp4: no such file"):
        ChatDataset(tmp_path / "llava.json", processor)


@pytest.mark.parametrize("members", ["json and media", "chats", "other names"])
def test_tar_shards_are_read_in_place(tmp_path: Path, media: Path, processor: Any, members: str, cache: Path) -> None:
    names = list(TEXTS)
    for shard, group in enumerate((names[:2], names[2:])):
        with tarfile.open(tmp_path / f"shard-{shard:06d}.tar", "w") as archive:
            for number, name in enumerate(group):
                key, suffix = f"clips.v1/{number:04d}", name.partition(".")[2]
                record: dict[str, Any] = {"question": "What is it?", "answer": TEXTS[name]}
                if members == "other names":
                    record[kind(name)] = f"somewhere/{name}"
                if members == "chats":
                    part = {"type": kind(name), "path": f"{number:04d}.{suffix}"}
                    content = [part, {"type": "text", "text": "What is it?"}]
                    answer = {"role": "assistant", "content": TEXTS[name]}
                    record = {"messages": [{"role": "user", "content": content}, answer]}
                add(archive, f"{key}.{suffix}", (media / name).read_bytes())
                add(archive, f"{key}.json", json.dumps(record).encode())
    reference = expected(media, processor, tmp_path)
    for path in (tmp_path / "shard-{000000..000001}.tar", tmp_path / "shard-*.tar"):
        data = check_equal(path, processor, reference)
    assert [sample.place.rpartition("/")[2] for sample in (data[0], data[1], data[2])] == ["0000", "0001", "0000"]
    assert data[2].place == f"{tmp_path / 'shard-000001.tar'}:clips.v1/0000"
    assert not cache.exists()


def test_damaged_and_unusable_shards_are_named(tmp_path: Path, processor: Any) -> None:
    def written(*members: tuple[str, bytes]) -> Path:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for name, content in members:
                add(archive, name, content)
        return tmp_path / "a.tar"

    with pytest.raises(DataError, match="a.tar:0: its members are bin; expected json, or txt, beside images"):
        ChatDataset(written(("0.bin", b"x")), processor)
    with pytest.raises(DataError, match="a.tar:0: its member json is not JSON"):
        ChatDataset(written(("0.json", b"{")), processor)
    with pytest.raises(DataError, match="two members 0.txt"):
        open_records(written(("0.txt", b"x"), ("0.txt", b"y")))
    path = written(("0.json", b"{}"), ("1.mp4", bytes(5000)))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match="a.tar: .*was the download complete"):
        open_records(path)


@pytest.mark.parametrize("form", ["metadata.jsonl", "metadata.csv"])
def test_folder_with_metadata(tmp_path: Path, media: Path, processor: Any, form: str) -> None:
    rows = [{"file_name": name, "question": "What is it?", "answer": answer} for name, answer in TEXTS.items()]
    folder = tmp_path / "train"
    folder.mkdir()
    for name in TEXTS:
        (folder / name).symlink_to(media / name)
    if form.endswith("jsonl"):
        (folder / form).write_text("\n".join(map(json.dumps, rows)))
    else:
        with (folder / form).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    for path in (folder, folder / form, tmp_path / "train/../train"):
        data = check_equal(path, processor, expected(media, processor, tmp_path))
    assert data[0].place.endswith(f"{form}:1" if form.endswith("jsonl") else f"{form}, record 1")


def test_video_of_an_id_is_found_beside_the_table(tmp_path: Path, media: Path, processor: Any) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/xyz.mkv").symlink_to(media / "b.mkv")
    row = {"videoID": "xyz", "question": "What is it?", "options": ["Red.", "Blue."], "answer": "B"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    batch = ChatDataset(tmp_path / "test.jsonl", processor, num_frames=2, template="{question}").batch([0])
    assert batch.frames == 2
    (tmp_path / "data/xyz.mkv").unlink()
    with pytest.raises(DataError, match=r"test.jsonl:1: .*: no file xyz.mp4 \(or another video format\) in "):
        ChatDataset(tmp_path / "test.jsonl", processor)


@pytest.mark.parametrize("stored", ["paths", "bytes", "lists"])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_tables_with_paths_and_with_bytes(tmp_path: Path, media: Path, processor: Any, form: str, stored: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet  # noqa: F401

    def cell(name: str, wanted: str) -> Any:
        if kind(name) != wanted:
            return None
        value = name if stored == "paths" else {"bytes": (media / name).read_bytes(), "path": name}
        return [value] if stored == "lists" else value

    file = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    column = {"paths": arrow.string(), "bytes": file, "lists": arrow.list_(file)}[stored]
    turns = [[{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": x}] for x in TEXTS.values()]
    suffix = "s" if stored == "lists" else ""
    columns = {
        f"{wanted}{suffix}": arrow.array([cell(name, wanted) for name in TEXTS], column)
        for wanted in ("image", "video")
    }
    table = arrow.table({"id": ["x", "y", "z"], "conversations": turns, **columns})
    folder = tmp_path / "set"
    folder.mkdir()
    if form == "parquet":
        arrow.parquet.write_table(table.slice(0, 2), folder / "train-00000-of-00002.parquet", row_group_size=1)
        arrow.parquet.write_table(table.slice(2), folder / "train-00001-of-00002.parquet")
    else:
        with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
    root = {"media_root": media} if stored == "paths" else {}
    data = check_equal(folder, processor, expected(media, processor, tmp_path), **root)
    name = "train-00001-of-00002.parquet:1" if form == "parquet" else "data-00000-of-00001.arrow:3"
    assert data[2].place == str(folder / name)


def test_directory_of_save_to_disk(tmp_path: Path, media: Path, processor: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"question": ["What is it?"] * 3, "answer": list(TEXTS.values())}
    rows["video"] = [None if kind(name) == "image" else str(media / name) for name in TEXTS]
    rows["image"] = [None if kind(name) == "video" else str(media / name) for name in TEXTS]
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "one.parquet"))
    for path in (tmp_path / "saved", tmp_path / "saved/train", tmp_path / "one.parquet"):
        check_equal(path, processor, expected(media, processor, tmp_path))


def test_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"a.parquet: reading parquet .* pip install 'mllm-seqpar\[data\]'"):
        open_records(tmp_path / "a.parquet")


def test_data_urls_are_files_of_the_cache(tmp_path: Path, media: Path, processor: Any, cache: Path) -> None:
    import base64

    content = base64.b64encode((media / "1.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Red."}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    data = ChatDataset(path, processor)
    assert not cache.exists() and data.batch([0]).frames == 1
    assert [file.suffix for file in (cache / "media").iterdir() if file.suffix != ".lock"] == [".png"]
    path.write_text(path.read_text().replace(content, "***"))
    with pytest.raises(VideoError, match=r"a.jsonl:1: data:image/png;base64,\*\*\*\.\.\.: not a data URL"):
        ChatDataset(path, processor).batch([0])
