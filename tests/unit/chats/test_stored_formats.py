"""Layer: one process, real files. One data set in every form of storage gives the same text and the same pixels."""

import base64
import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow as arrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image, PngImagePlugin

from chats import chat, write_rows
from clips import write_clip
from launch import PYTHON
from mllm_seqpar.chats.forms import read_record
from mllm_seqpar.chats.needle import make_tokenizer
from mllm_seqpar.chats.records import open_records
from mllm_seqpar.data import ChatDataset, chat_family, load_local_images
from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.videos.images import read_image
from mllm_seqpar.videos.media_files import CACHE_VARIABLE
from selections import slow_unless

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
    """The media cache; that of `datasets` is a folder of the test too."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def processor() -> Any:
    tokenizer = make_tokenizer(["What is it? Describe the image video."])
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tokenizer, cut_enable=False)


def kind(name: str) -> str:
    return "image" if name.endswith("png") else "video"


def shown(name: str, path: str) -> dict[str, Any]:
    """Return a file of the data set as a conversation that names it by `path`."""
    return chat({"type": kind(name), "path": path}, "What is it?", answer=TEXTS[name])


def batches(data: ChatDataset, processor: Any) -> list[Any]:
    found = []
    for index in (2, 0, 1):  # in any order
        batch = data.batch([index])
        found.append((batch, load_local_images(batch, range(batch.frames), chat_family(processor))[0]))
    return found


@pytest.fixture(scope="module")
def reference(media: Path, processor: Any) -> list[Any]:
    """The batches of the data set as chats in JSONL beside the media."""
    write_rows(media / "reference.jsonl", [shown(name, name) for name in TEXTS])
    return batches(ChatDataset(media / "reference.jsonl", processor), processor)


def write_llava(folder: Path, media: Path) -> list[Any]:
    rows = [
        {
            "id": str(number),
            kind(name): name,
            "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": answer}],
        }
        for number, (name, answer) in enumerate(TEXTS.items())
    ]
    (folder / "llava.json").write_text(json.dumps(rows))
    return [folder / "llava.json"]


def write_folder(form: str) -> Callable[[Path, Path], list[Any]]:
    def write(folder: Path, media: Path) -> list[Any]:
        rows = [{"file_name": name, "question": "What is it?", "answer": answer} for name, answer in TEXTS.items()]
        train = folder / "train"
        train.mkdir()
        for name in TEXTS:
            (train / name).symlink_to(media / name)
        with (train / form).open("w", newline="") as file:
            if form.endswith("jsonl"):
                file.write("\n".join(map(json.dumps, rows)))
            else:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        return [train, train / form, folder / "train/../train"]

    return write


def write_table(form: str, stored: str) -> Callable[[Path, Path], list[Any]]:
    """Return a function that writes LLaVA's records as `form`, with media as paths, bytes or lists of bytes."""

    def write(folder: Path, media: Path) -> list[Any]:
        def cell(name: str, wanted: str) -> Any:
            if kind(name) != wanted:
                return None
            content = (media / name).read_bytes()
            value = {"paths": name, "no names": {"bytes": content}}.get(stored, {"bytes": content, "path": name})
            return [value] if stored == "lists" else value

        file = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
        only = arrow.struct({"bytes": arrow.binary()})
        column = {"paths": arrow.string(), "bytes": file, "lists": arrow.list_(file), "no names": only}[stored]
        asked = {"from": "human", "value": "<image>\nWhat is it?"}
        columns: dict[str, Any] = {"conversations": [[asked, {"from": "gpt", "value": x}] for x in TEXTS.values()]}
        for wanted in ("image", "video"):
            name = wanted + ("s" if stored == "lists" else "")
            columns[name] = arrow.array([cell(name, wanted) for name in TEXTS], column)
        table = arrow.table(columns)
        if form == "arrow":
            with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
                stream.write_table(table)
            return [folder]
        arrow.parquet.write_table(table.slice(0, 2), folder / "train-00000-of-00002.parquet", row_group_size=1)
        arrow.parquet.write_table(table.slice(2), folder / "train-00001-of-00002.parquet")
        return [folder, folder / "train-*.parquet"]

    return write


def write_saved(folder: Path, media: Path) -> list[Any]:
    import datasets

    rows = {"question": ["What is it?"] * 3, "answer": list(TEXTS.values())}
    rows["video"] = [None if kind(name) == "image" else str(media / name) for name in TEXTS]
    rows["image"] = [None if kind(name) == "video" else str(media / name) for name in TEXTS]
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": data}).save_to_disk(str(folder / "saved"))
    data.select([0, 2, 1]).select([0, 2, 1]).save_to_disk(str(folder / "selected"))
    data.to_parquet(str(folder / "one.parquet"))
    return [folder / "saved", folder / "saved/train", folder / "selected", folder / "one.parquet"]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_shards(members: str) -> Callable[[Path, Path], list[Any]]:
    """Return a function that writes two shards whose samples have different members and different keys in JSON."""

    def write(folder: Path, media: Path) -> list[Any]:
        names = list(TEXTS)
        for shard, group in enumerate((names[:2], names[2:])):
            with tarfile.open(folder / f"shard-{shard:06d}.tar", "w") as archive:
                for number, name in enumerate(group):
                    key, suffix = f"clips.v1/{number:04d}", name.partition(".")[2]
                    record: dict[str, Any] = {"question": "What is it?", "answer": TEXTS[name]}
                    if members == "other names":
                        record[kind(name)] = f"somewhere/{name}"
                    if members == "chats":
                        record = shown(name, f"{number:04d}.{suffix}")
                    add(archive, f"{key}.{suffix}", (media / name).read_bytes())
                    add(archive, f"{key}.json", json.dumps(record).encode())
        return [folder / "shard-{000000..000001}.tar", folder / "shard-*.tar", folder]

    return write


FORMS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "LLaVA's list": write_llava,
    "folder with metadata.jsonl": write_folder("metadata.jsonl"),
    "folder with metadata.csv": write_folder("metadata.csv"),
    **{
        f"{form} with {stored}": write_table(form, stored)
        for form in ("parquet", "arrow")
        for stored in ("paths", "bytes", "no names", "lists")
    },
    "save_to_disk": write_saved,
    **{f"tar with {members}": write_shards(members) for members in ("json and media", "chats", "other names")},
}
QUICK = ("LLaVA's list", "folder with metadata.csv", "parquet with bytes", "arrow with lists", "tar with chats")


@pytest.mark.parametrize("form", slow_unless(lambda form: form in QUICK, FORMS))
def test_every_form_gives_the_same_batches(
    tmp_path: Path, media: Path, processor: Any, reference: list[Any], form: str, cache: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    options: dict[str, Any] = {"media_root": media} if form.endswith(("list", "paths")) else {}
    for path in FORMS[form](folder, media):
        data = ChatDataset(path, processor, **options)
        digest = data.content_digest()
        assert (data.records.place(1) == f"{path / 'metadata.jsonl' if path.is_dir() else path}:2") or (
            data.records.place(1).endswith(", record 2")
        )
        for (batch, pixels), (other, other_pixels) in zip(batches(data, processor), reference, strict=True):
            assert torch.equal(batch.input_ids, other.input_ids) and torch.equal(batch.labels, other.labels)
            assert torch.equal(pixels, other_pixels)
        again = ChatDataset(path, processor, **options)
        assert (again.records.digest, again.content_digest()) == (data.records.digest, digest)
    embedded = form.startswith("tar") or form.endswith(("bytes", "names", "lists"))
    assert cache.exists() == (embedded or form == "save_to_disk")


def test_ranks_that_open_a_table_at_once_read_the_same_rows(tmp_path: Path, media: Path) -> None:
    (path, _) = write_table("parquet", "bytes")(tmp_path, media)
    code = (
        "import json, sys; from mllm_seqpar.chats.records import open_records; records = open_records(sys.argv[1]);"
        "print(records.digest, json.dumps([records.record(index) for index in range(len(records))]))"
    )
    command = [*PYTHON, "-c", code, str(path)]
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    ranks = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (rows,) = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert rows and not any(rank.returncode for rank in ranks)


def test_video_of_an_id_is_found_beside_the_table(tmp_path: Path, media: Path, processor: Any) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/xyz.mkv").symlink_to(media / "b.mkv")
    row = {"videoID": "xyz", "question": "What is it?", "options": ["Red.", "Blue."], "answer": "B"}
    write_rows(tmp_path / "test.jsonl", [row])
    batch = ChatDataset(tmp_path / "test.jsonl", processor, num_frames=2, template="{question}").batch([0])
    assert batch.frames == 2
    (tmp_path / "data/xyz.mkv").unlink()
    with pytest.raises(DataError, match=r"test.jsonl:1: .*: no file xyz.mp4 \(or another video format\) in "):
        ChatDataset(tmp_path / "test.jsonl", processor)


@pytest.mark.parametrize(
    ("members", "size", "message"),
    [
        ([("0.bin", b"x")], None, "a.tar: cannot be read .*members are neither json nor txt, images or videos"),
        ([("0.json", b"{"), ("1.txt", b"x")], None, "a.tar, record 1: its member json is not JSON .Expecting property"),
        ([("0.txt", b"x"), ("0.txt", b"y")], None, "Duplicate field 'txt' for sample '0'"),
        ([("0.json", b"{}"), ("1.mp4", bytes(5000))], 3000, "a.tar: .*check that the download is complete"),
        ([("0.mp4", b"x"), ("1.json", b"[1]")], None, "a.tar, record 1: has the keys 'video'"),
    ],
)
def test_damaged_and_unusable_shards_are_named(
    tmp_path: Path, members: list[tuple[str, bytes]], size: int | None, message: str
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            add(archive, name, content)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=message):
        ChatDataset(path, None)


def test_shard_that_is_removed_after_it_is_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "0.mp4", b"x")
        add(archive, "0.txt", b"Red.")
    records = open_records(path)
    path.unlink()
    with pytest.raises(
        VideoError, match=r"^0.mp4: cannot be read \(No such file or directory\); it is inside .*a.tar$"
    ):
        records.locate(0, "0.mp4")


def test_members_that_are_not_read_may_have_any_content(tmp_path: Path) -> None:
    record = {"question": "What is it?", "answer": "Red.", "large": 2**70, "none": None}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for extension in ("cls", "npy", "msg", "cbor", "pth", "meta.json", "transcript"):
            add(archive, f"0.{extension}", b"\xff")
        add(archive, "0.json", json.dumps(record).encode())
        add(archive, "1.txt", b"caf\xe9")
    records = open_records(tmp_path / "a.tar")
    assert [records.record(index) for index in range(2)] == [
        {name: value for name, value in record.items() if value is not None},
        {"text": "caf\N{REPLACEMENT CHARACTER}"},
    ]


def test_media_of_a_changed_table_are_not_those_of_the_cache(tmp_path: Path) -> None:
    contents = [bytes(400_000), bytes(200_000) + b"x" + bytes(199_999)]  # equal in the samples of the digest
    for content in contents:
        table = arrow.table({"question": ["What is it?"], "answer": ["Red."], "image": [content]})
        arrow.parquet.write_table(
            table, tmp_path / "a.parquet", compression="none", use_dictionary=False, write_statistics=False
        )
        records = open_records(tmp_path / "a.parquet")
        assert Path(records.locate(0, records.record(0)["image"][0])).read_bytes() == content


def test_format_that_save_to_disk_keeps_is_not_used(tmp_path: Path) -> None:
    import datasets

    rows = {"question": ["What is it?"], "answer": ["Red."], "video": ["a.mp4"], "start": [1]}
    data = datasets.Dataset.from_dict(rows)
    data.set_format("numpy", columns=["question", "start"])
    data.save_to_disk(str(tmp_path / "saved"))
    assert repr(open_records(tmp_path / "saved").record(0)) == repr({name: value for name, (value,) in rows.items()})


def test_missing_datasets_and_damaged_tables_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet: cannot be read \(Parquet file size is 4 bytes"):
        open_records(tmp_path / "a.parquet")
    for number, answer in enumerate((1, "Red.")):
        arrow.parquet.write_table(arrow.table({"answer": [answer]}), tmp_path / f"b-{number}.parquet")
    with pytest.raises(
        DataError, match="2 files: .*Failed to parse string: 'Red.' as a scalar of type int64.*same type"
    ):
        open_records(tmp_path / "b-*.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"a.parquet: reading parquet and arrow files .* pip install 'mllm-seqpar\[data\]'"
    ):
        open_records(tmp_path / "a.parquet")


def write_file(table: Any, path: Path) -> None:
    """Write a table as parquet, or in one of the two formats of arrow: files with even numbers are streams."""
    if path.suffix == ".parquet":
        arrow.parquet.write_table(table, path)
        return
    streams = int(path.stem[6:11]) % 2 == 0
    with (arrow.ipc.new_stream if streams else arrow.ipc.new_file)(str(path), table.schema) as file:
        file.write_table(table)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_files_of_a_split_may_have_different_columns(tmp_path: Path, suffix: str) -> None:
    from_first, text = arrow.struct({"from": arrow.string(), "value": arrow.string()}), arrow.string()
    value_first = arrow.struct({"value": text, "from": text, "weight": arrow.float32()})
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "Red."}]
    image = arrow.array([{"bytes": b"x", "path": "a.png"}], arrow.struct({"bytes": arrow.binary(), "path": text}))
    tables = [
        {"conversations": arrow.array([turns], arrow.list_(from_first)), "image": image, "id": arrow.nulls(1)},
        {
            "start": [1],
            "conversations": arrow.array([turns], arrow.list_(value_first)),
            "video": ["a.mp4"],
            "id": ["7"],
        },
        {"conversations": arrow.array([], arrow.list_(from_first)), "start": arrow.array([], arrow.float64())},
    ]
    for number, table in enumerate(tables):
        write_file(arrow.table(table), tmp_path / f"train-{number:05d}-of-00003.{suffix}")
    records = open_records(tmp_path)
    first, second = (records.record(index) for index in range(len(records)))
    assert Path(records.locate(0, first["image"][0])).read_bytes() == b"x" and set(first) == {"conversations", "image"}
    assert (second["start"], second["video"], second["id"]) == (1, "a.mp4", "7")
    assert [read_record(x).media[0].kind for x in (first, second)] == ["image", "video"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_types_that_cannot_be_merged_become_that_of_the_first_file(tmp_path: Path, suffix: str) -> None:
    import datasets

    features = datasets.Features({"id": datasets.Value("string"), "image": datasets.Image()})
    first = datasets.Dataset.from_dict({"id": ["a"], "image": [{"bytes": b"x", "path": "a.png"}]}, features)
    write_file(first.data.table, tmp_path / f"train-00000-of-00002.{suffix}")
    second = arrow.table({"id": [7], "image": [b"y"], "start": [1]})
    write_file(second, tmp_path / f"train-00001-of-00002.{suffix}")
    records = open_records(tmp_path)
    assert [records.record(index)["id"] for index in range(2)] == ["a", "7"] and records.record(1)["start"] == 1
    files = [records.locate(index, records.record(index)["image"][0]) for index in range(2)]
    assert [Path(file).read_bytes() for file in files] == [b"x", b"y"]


def test_data_urls_are_files_of_the_cache(tmp_path: Path, media: Path, processor: Any, cache: Path) -> None:
    content = base64.b64encode((media / "1.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    path = write_rows(tmp_path / "a.jsonl", [chat(part)])
    data = ChatDataset(path, processor)
    assert not cache.exists() and data.batch([0]).frames == 1
    assert [file.suffix for file in (cache / "media").iterdir() if file.suffix != ".lock"] == [".png"]
    path.write_text(path.read_text().replace(content, "***"))
    with pytest.raises(VideoError, match=r"a.jsonl:1: data:image/png;base64,\*\*\*: not a valid URL"):
        ChatDataset(path, processor).batch([0])


CSV, RECURSION = b"question,answer\n", "not JSON .maximum recursion depth exceeded"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", CSV + b"What, then?,Red.\n", "a.csv, record 1: has more cells than the header has columns"),
        ("a.csv", CSV + "What?,Ros\xe9\n".encode("latin1"), r"a.csv: not CSV in UTF-8 \('utf-8' codec"),
        ("a.csv", CSV + b"x" * 200_000 + b",y\n", r"a.csv: not CSV in UTF-8 \(field larger than"),
        ("a.jsonl", b'{"question": "What?", "answer": ' + b"[" * 100_000, f"a.jsonl:1: {RECURSION}"),
        ("a.jsonl", b"[" * 100_000, f"a.jsonl: {RECURSION}"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "a.jsonl: is compressed by gzip; .* gunzip < a.jsonl > OUT.jsonl"),
        (
            "a.jsonl",
            b'{"conversations": [{"from": ["human"], "value": "?"}]}',
            r"a.jsonl:1: turn 0 .* from \['human'\]",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}',
            "a.jsonl:1: .* is not a part",
        ),
        (
            "a.jsonl",
            b'{"question": "?", "answer": "x", "image": "%s"}' % (b"iVBO" * 1000),
            "a.jsonl:1: .*: no such file",
        ),
        (
            "a.jsonl",
            b'{"question": "?", "answer": "x", "video": "."}',
            "a.jsonl:1: .*: is a directory, not a file; list",
        ),
        ("a.jsonl", b"{\n", "a.jsonl:1: not JSON"),
        (
            "a.json",
            b'{\n"data": []\n}',
            r"a.json: is one object over several lines \(keys: 'data'\); expected one list",
        ),
        ("a.jsonl", b"\n3\n", 'a.jsonl:2: is 3; needs "messages"'),
        ("a.jsonl", b"\n", "a.jsonl: contains no conversation"),
        ("a.json", b'[{"a": 1}\n{"b": 2}]', r"a.json: not JSON \(Expecting ',' delimiter: line 2"),
        ("a.json", b'[\n{"a": 1},\n{', r"a.json: not JSON \(.*line 3"),
    ],
)
def test_content_that_no_parser_takes_is_named_by_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        ChatDataset(tmp_path / name, None)
    assert len(str(error.value)) < 1000


def test_keys_without_a_value_count_as_absent(tmp_path: Path) -> None:
    turns = [{"from": "human", "role": None, "value": "What?"}, {"role": "assistant", "from": None, "content": "Red."}]
    rows = [
        chat("What is it?") | {"image": None, "conversations": None, "start": None},
        {"question": None, "conversations": turns},
        {"question": "What is it?", "answer": "Red.", "options": None},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for path in (write_rows(tmp_path / "a.jsonl", rows), tmp_path / "a.json"):
        assert [len(ChatDataset(path, None).messages(index)) for index in range(3)] == [2, 2, 2]


def test_numbers_of_tables_choose_frames(tmp_path: Path, media: Path) -> None:
    header, cells = "question,answer,video,start,num_frames,fps", ("0.5,2,", ",,2")
    lines = [header, *(f"What?,Red.,a.mp4,{row}" for row in cells)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    table = {"question": ["What?"] * 2, "answer": ["Red."] * 2, "video": ["a.mp4"] * 2}
    table |= {"start": [0.5, None], "num_frames": [2.0, None], "fps": [None, 2.0]}
    arrow.parquet.write_table(arrow.table(table), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        samples = ChatDataset(tmp_path / name, None, media_root=media)
        (first,), (second,) = (samples[index].sources for index in range(2))
        assert (len(first), len(second)) == (2, 5) and first.seconds(0) > second.seconds(0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_files_of_one_split_of_texts_are_one_data_set(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        row = {"question": f"What is {number}?", "answer": "Red."}
        csv_text = f"question,answer\nWhat is {number}?,Red."
        text = {".jsonl": json.dumps(row) + "\n", ".json": json.dumps([row]), ".csv": csv_text}
        (tmp_path / f"data/train-0000{number}-of-00002{suffix}").write_text(text[suffix])
    (tmp_path / "README.md").write_text("A data set of the Hub.")
    (tmp_path / "dataset_infos.json").write_text("{}")
    for path in (tmp_path, tmp_path / f"data/train-*{suffix}"):
        records = open_records(path)
        assert [records.record(index)["question"] for index in range(len(records))] == ["What is 0?", "What is 1?"]
        assert records.place(1).startswith(str(tmp_path / f"data/train-00001-of-00002{suffix}"))
    (tmp_path / f"data/test{suffix}").write_text("")
    with pytest.raises(DataError, match=f"several splits or subsets; give one of them: .*data/test.*{suffix}, .*train"):
        open_records(tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_media_of_files_in_several_folders_are_not_confused(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.mp4").write_text(name)
        row = {"question": "What is it?", "answer": "Red.", "videoID": "1", "video": f"{name}/1.mp4"}
        if suffix == ".jsonl":
            (tmp_path / name / "train.jsonl").write_text(json.dumps(row))
        else:
            table = arrow.table({key: [value] for key, value in row.items()})
            arrow.parquet.write_table(table, tmp_path / name / "train.parquet")
    records = open_records(tmp_path / f"*/train{suffix}")
    for index, name in enumerate(("a", "b")):
        if suffix == ".jsonl":  # paths start at the folder of the file that names them
            assert Path(records.locate(index, "1.mp4")).read_text() == name
            assert Path(records.locate(index, "video-id:1")).read_text() == name
        else:  # the file of a row is not known, so they start at the folder of all files
            assert Path(records.locate(index, f"{name}/1.mp4")).read_text() == name
            with pytest.raises(VideoError, match="1.mp4: no such file"):
                records.locate(index, "1.mp4")
    with_root = open_records(tmp_path / f"*/train{suffix}", media_root=tmp_path / "b")
    assert [Path(with_root.locate(index, "1.mp4")).read_text() for index in range(2)] == ["b", "b"]


def test_other_texts_beside_a_data_set_in_a_directory_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.json").write_text("{}")
    (tmp_path / "train/metadata.jsonl").write_text(json.dumps({"file_name": "a.mp4", "text": "Red."}))
    assert open_records(tmp_path).record(0) == {"file_name": "a.mp4", "text": "Red."}
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "What is it?", "answer": "Red."}))
    (tmp_path / "results.csv").write_text("model,accuracy\na,0.5")
    assert open_records(tmp_path).record(0)["question"] == "What is it?"


def test_damaged_index_of_splits_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("")
    with pytest.raises(DataError, match="dataset_dict.json: not an index of splits .*was the download complete"):
        open_records(tmp_path)


def test_columns_of_views_and_of_nested_lists(tmp_path: Path) -> None:
    rows = {"question": ["What?"], "answer": ["Red."], "image": arrow.array([b"x"], arrow.binary_view())}
    arrow.parquet.write_table(arrow.table(rows), tmp_path / "a.parquet")
    records = open_records(tmp_path / "a.parquet")
    assert Path(records.locate(0, records.record(0)["image"][0])).read_bytes() == b"x"
    arrow.parquet.write_table(arrow.table(rows | {"image": [[[b"x"]]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, record 1: image is \[b'x'\]; expected the path of a file"):
        ChatDataset(tmp_path / "b.parquet", None)


def test_images_of_16_bits_keep_their_shades_and_those_of_too_many_pixels_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shades = numpy.arange(48, dtype=numpy.uint16).reshape(6, 8) * 1300
    Image.fromarray(shades).save(tmp_path / "a.png")
    expected = torch.from_numpy((shades >> 8).astype(numpy.uint8))
    assert torch.equal(read_image(str(tmp_path / "a.png"), None), expected.expand(3, 6, 8))
    with monkeypatch.context() as patched:
        patched.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))  # as in Pillow 10.0 to 10.2
        assert torch.equal(read_image(str(tmp_path / "a.png"), None), expected.expand(3, 6, 8))
    Image.new("1", (20_000, 10_000)).save(tmp_path / "b.png")
    with pytest.raises(VideoError, match="b.png: not a readable image .Image size .200000000 pixels. exceeds limit"):
        read_image(str(tmp_path / "b.png"), None)
