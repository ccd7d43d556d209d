"""Layer: pure Python. Records in the layouts of other projects become chats; what is unknown or ambiguous is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from chats import asks, image, says, video
from mllm_seqpar.chats.forms import read_record
from mllm_seqpar.chats.multiple_choice import MultipleChoice, read_choice
from mllm_seqpar.chats.records import open_records
from mllm_seqpar.errors import DataError


def llava(*values: str, **media: Any) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]
    return {"id": "997bb945", **media, "conversations": turns}


VIDEO_MME = {
    "video_id": "001",
    "duration": "short",
    "domain": "Knowledge",
    "sub_category": "Humanity & History",
    "url": "https://www.youtube.com/watch?v=fFjv93ACGo8",
    "videoID": "fFjv93ACGo8",
    "question_id": "001-1",
    "task_type": "Counting Problem",
    "question": "How many doors open?",
    "options": ["A. One.", "B. Two.", "C. Three.", "D. Four."],
    "answer": "C",
}
LONG_VIDEO_BENCH = {
    "video_path": "86CxyhFV9MI.mp4",
    "question": "What is red?",
    "question_category": "S2E",
    "candidates": ["the door", "the lamp"],
    "correct_choice": 1,
}
MV_BENCH = {"video": "a.webm", "question": "Which one?", "candidates": ["a cup", "a box"], "answer": "a box"}
PROMPT = "\nReply with the letter of the correct option."

CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "our own": (
        {"messages": [asks(video("a.mp4", num_frames=3), "What?"), says("It.")], "id": 17},
        [asks(video("a.mp4", num_frames=3), "What?"), says("It.")],
    ),
    "LLaVA image": (
        llava("<image>\nWhat?", "A cat.", "And?", "A dog.", image="coco/1.jpg"),
        [asks(image("coco/1.jpg"), "What?"), says("A cat."), {"role": "user", "content": "And?"}, says("A dog.")],
    ),
    "LLaVA image with the name of its origin": (
        llava("<image>\nWhat?", "A cat.", image="coco/1.jpg", file_name="000001.jpg", source_file_names=["a.zip"]),
        [asks(image("coco/1.jpg"), "What?"), says("A cat.")],
    ),
    "question with the name of a transcript": (
        {"file_name": "a.json", "video": "a.mp4", "question": "What?", "answer": "It."},
        [asks(video("a.mp4"), "What?"), says("It.")],
    ),
    "LLaVA images within text": (
        llava("Is <image> like <image>?", "No.", image=["1.jpg", "2.jpg"]),
        [asks("Is ", image("1.jpg"), " like ", image("2.jpg"), "?"), says("No.")],
    ),
    "LLaVA video by <image>": (
        llava("<image>\nWhat?", "It.", video="a.mp4"), [asks(video("a.mp4"), "What?"), says("It.")],
    ),
    "LLaVA video by <video>": (
        llava("What?\n<video>", "It.", video="a.mp4", fps=2), [asks("What?", video("a.mp4", fps=2)), says("It.")],
    ),
    "LLaVA text": (llava("Hello.", "Hello!"), [{"role": "user", "content": "Hello."}, says("Hello!")]),
    "OpenAI": (
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                asks("What?", {"type": "image_url", "image_url": {"url": "https://x.org/1.png", "detail": "low"}}),
                {"role": "assistant", "content": [{"type": "text", "text": "It."}]},
            ]
        },
        [
            {"role": "system", "content": "Be brief."},
            asks("What?", image("https://x.org/1.png")),
            {"role": "assistant", "content": [{"type": "text", "text": "It."}]},
        ],
    ),
    "OpenAI with the detail of an image in two places": (
        {"messages": [asks({"type": "image_url", "image_url": {"url": "1.png", "detail": "low"}, "detail": "auto"})]},
        [asks(image("1.png"))],
    ),
    "OpenAI responses and video_url": (
        {
            "messages": [
                asks(
                    {"type": "input_text", "text": "What?"},
                    {"type": "input_image", "image_url": "1.png"},
                    {"type": "video_url", "video_url": {"url": "a.mp4"}},
                ),
                says("It."),
            ]
        },
        [asks("What?", image("1.png"), video("a.mp4")), says("It.")],
    ),
    "Qwen": (
        {"messages": [asks({"type": "video", "video": "a.mp4", "fps": 2.0}, {"type": "image", "url": "1.png"})]},
        [asks(video("a.mp4", fps=2.0), image("1.png"))],
    ),
    "clip of Qwen": (
        {"messages": [asks({"type": "video", "video": "a.mp4", "video_start": 1.5, "video_end": 4})]},
        [asks(video("a.mp4", start=1.5, end=4))],
    ),
    "clip of MVBench": (
        MV_BENCH | {"start": 2.0, "end": "0:01:03.5"},
        [asks(video("a.webm", start=2.0, end=63.5), "Which one?\nA. a cup\nB. a box" + PROMPT), says("B")],
    ),
    "clip of a caption": (
        {"video": "a.mp4", "caption": "A cat.", "start_time": "01:02"},
        [asks(video("a.mp4", start=62.0), "Describe the video."), says("A cat.")],
    ),
    "row of a table": (
        {
            "messages": [
                asks({"type": "image", "text": None, "path": "1.png"}, {"type": "text", "text": "What?", "path": None}),
                says("It.") | {"tool_calls": None},
            ]
        },
        [asks(image("1.png"), "What?"), says("It.")],
    ),
    "placeholders and lists": (
        {
            "messages": [{"role": "user", "content": "<image><video>What?"}, says("It.")],
            "images": ["1.png"],
            "videos": ["a.mp4"],
        },
        [asks(image("1.png"), video("a.mp4"), "What?"), says("It.")],
    ),
    "parts without a path": (
        {"messages": [asks({"type": "image"}, "What?"), says("It.")], "images": [{"path": "1.png"}]},
        [asks(image("1.png"), "What?"), says("It.")],
    ),
    "Video-MME": (
        VIDEO_MME,
        [
            asks(video("video-id:fFjv93ACGo8"), "How many doors open?\nA. One.\nB. Two.\nC. Three.\nD. Four." + PROMPT),
            says("C"),
        ],
    ),
    "LongVideoBench": (
        LONG_VIDEO_BENCH,
        [asks(video("86CxyhFV9MI.mp4"), "What is red?\nA. the door\nB. the lamp" + PROMPT), says("B")],
    ),
    "MVBench": (MV_BENCH, [asks(video("a.webm"), "Which one?\nA. a cup\nB. a box" + PROMPT), says("B")]),
    "question and answer": (
        {"image": "1.png", "question": "What?", "answer": "It."}, [asks(image("1.png"), "What?"), says("It.")],
    ),
    "a row of a folder": (
        {"file_name": "0.mp4", "first_file_names": ["2.png", "1.png"], "question": "What?", "answer": "It."},
        [asks(image("2.png"), image("1.png"), video("0.mp4"), "What?"), says("It.")],
    ),
    "file names beside an empty column": (
        {"image": "", "file_name": "1.png", "text": "A cat."},
        [asks(image("1.png"), "Describe the image."), says("A cat.")],
    ),
    "system prompt of a record of ms-swift": (
        llava("<video>What?", "It.", video="a.mp4", system="Be brief.", tools=[], audio=None, fps=None),
        [{"role": "system", "content": "Be brief."}, asks(video("a.mp4"), "What?"), says("It.")],
    ),
    "system prompt beside messages": (
        {"messages": [asks("What?"), says("It.")], "system": "Be brief.", "images": [], "audios": [], "tools": None},
        [{"role": "system", "content": "Be brief."}, asks("What?"), says("It.")],
    ),
    "system prompt of a question": (
        {"image": "1.png", "question": "What?", "answer": "It.", "system": "Be brief."},
        [{"role": "system", "content": "Be brief."}, asks(image("1.png"), "What?"), says("It.")],
    ),
    "turns with keys of no effect": (
        {
            "conversations": [
                {"from": "human", "value": "Hello.", "markdown": None, "id": 3, "weight": None, "loss": False},
                {"from": "gpt", "value": "Hello!", "timestamp": 1.5, "tool_calls": [], "weight": 1.0, "train": True},
            ]
        },
        [{"role": "user", "content": "Hello."}, says("Hello!")],
    ),
    "placeholders in parts": (
        {
            "messages": [asks({"type": "image"}, "Is it like <image>?"), says("<image> is a tag of HTML.")],
            "images": ["1.png", "2.png"],
            "videos": [],
        },
        [asks(image("1.png"), "Is it like ", image("2.png"), "?"), says("<image> is a tag of HTML.")],
    ),
    "two keys with the same answer": (
        LONG_VIDEO_BENCH | {"answer": "B", "correct_answer": "the lamp", "answer_index": ""},
        [asks(video("86CxyhFV9MI.mp4"), "What is red?\nA. the door\nB. the lamp" + PROMPT), says("B")],
    ),
    "frames in the object of a video": (
        {
            "messages": [
                asks({"type": "video_url", "video_url": {"url": "a.mp4", "fps": 2, "video_start": 3, "detail": "low"}})
            ]
        },
        [asks(video("a.mp4", fps=2, start=3))],
    ),
    "question without an answer in a table": (
        {"image": "1.png", "question": "What?", "answer": None, "option": None},
        [asks(image("1.png"), "What?"), says("")],
    ),
    "question with an empty list of answers": (
        {"image": "1.png", "question": "What?", "answer": [], "correct_answer": ""},
        [asks(image("1.png"), "What?"), says("")],
    ),
    "caption": ({"image": "1.png", "text": "A cat."}, [asks(image("1.png"), "Describe the image."), says("A cat.")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_record_becomes_a_chat(name: str) -> None:
    record, messages = CASES[name]
    before = json.dumps(record)
    assert read_record(record, answered=False).to_json() == messages
    assert json.dumps(record) == before


@pytest.mark.parametrize(
    "record",
    [
        {"video": "a.mp4", "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "<video>?"}]},
        {"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "?"}]},
        {"video": "a.mp4", "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "<video>"}]},
    ],
)
def test_answer_before_its_question_is_refused_in_every_form(record: Any) -> None:
    with pytest.raises(DataError, match=r"message 0 \(assistant\) is the first message"):
        read_record(record)
    with pytest.raises(DataError, match=r"message 0 \(assistant\) is the first message"):
        read_record(record, answered=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "x", "completion": "y"},
            "has the keys 'prompt', 'completion', which is not a known format; expected mess",
        ),
        ([1], 'is .1.; needs "messages", a list of'),
        ({"messages": []}, 'needs "messages", a list of'),
        (
            {"messages": [asks("x"), says("y")], "images": ["1.png"]},
            r"has images \['1.png'\] outside the messages, so it would be ignored; media are parts of a message",
        ),
        ({"messages": [asks("x"), says("y")], "tools": [{}]}, r"has tools \[{}\] outside the messages"),
        (llava("x", "y", tools=[{"name": "f"}]), "has tools .* outside the messages, so it would be ignored"),
        ({"question": "x", "answer": "y", "audio": "a.wav"}, "has audio 'a.wav' outside the messages"),
        ({"image": "1.png", "text": "x", "audios": ["a.wav"]}, r"has audios \['a.wav'\] outside the messages"),
        (llava("x", "y", system=["z"]), r"system is \['z'\]; expected a text, which becomes the first message"),
        (
            {
                "messages": [{"role": "developer", "content": "z"}, asks("x"), says("y")],
                "system": "Be brief.",
            },
            r"has the key 'system' \('Be brief.'\) and a system message; give one of them",
        ),
        *(
            (
                {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", key: value}]},
                f"turn 1 of conversations has {key} .*, which would be ignored; all answers are targets",
            )
            for key, value in (
                ("weight", 0),
                ("loss", False),
                ("loss_scale", 2.0),
                ("loss_mask", 1),
                ("mask", True),
                ("train", False),
                ("train_detail", [{"begin_offset": 0, "end_offset": 3, "train": False}]),
                ("training", False),
                ("tool_calls", [{"name": "f"}]),
            )
        ),
        (
            {"messages": [{"role": "user", "content": "<image>\nWhat?"}, says("It.")]},
            r"has 0 files \(\) and the placeholders <image>; write one for each file",
        ),
        *(
            ({"messages": [asks("x"), says("y")], key: value}, f"has {key} {value!r} outside the messages")
            for key, value in (("image_path", "1.png"), ("video_path", "a.mp4"), ("fps", 2), ("start_time", "0:01"))
        ),
        (
            {"messages": [asks({"type": "image"}), says("It.")], "images": ["1.png"], "start": 3},
            "has start 3 but names no video, so it would be ignored; leave it out, or null in rows",
        ),
        ({"image": "1.png", "question": "x", "answer": "y", "end_time": 3}, "has end_time 3 but names no video"),
        ({"image": "1.png", "text": "A cat.", "end": 0}, "has end 0 but names no video"),
        (
            {"messages": [asks(video("a.mp4"), "x"), says("y")], "start": 3},
            "has start 3 outside the messages, so it would be ignored; state it in the part of its video, or leave it",
        ),
        (
            {"messages": [asks(video("a.mp4"), "x"), says("y")], "videos": ["a.mp4", "b.mp4"]},
            r"has videos \['a.mp4', 'b.mp4'\] outside the messages, so it would be ignored; media are parts",
        ),
        *(
            (
                {"video": "a.mp4", "question": "x", **answers},
                "has correct_answer 'B' but no list of options, so it would be ignored; give the options as one",
            )
            for answers in ({"correct_answer": "B"}, {"answer": "It.", "correct_answer": "B"})
        ),
        (
            {"messages": [asks(video("a.mp4"), "<video>What?"), says("It.")]},
            r"has 0 files \(\) and the placeholders <video>",
        ),
        (
            {"messages": [asks({"type": "image"}, "<image>What?"), says("It.")], "images": ["1.png"]},
            r"has 1 files \(1.png\) and the placeholders <image>, <image>",
        ),
        (llava("<image>", "It.", image="1.png", fps=2), "has fps 2 but names no video, so it would be ignored; leave"),
        (llava("x", "y", num_frames=8), "has num_frames 8 but names no video"),
        ({"image": "1.png", "text": "A cat.", "max_frames": 8}, "has max_frames 8 but names no video"),
        (
            {"messages": [{"role": "user", "content": "<image>"}, says("It.")], "images": ["1.png"], "fps": 2},
            "has fps 2 but names no video",
        ),
        (
            {"messages": [asks({"type": "video_url", "video_url": {"url": "a", "fps": 2}, "fps": 1}), says("x")]},
            "has a part in which fps is given twice; give it once",
        ),
        (
            LONG_VIDEO_BENCH | {"answer": "A"},
            "answer is 'A', but correct_choice is 1, which is another option; give one of them",
        ),
        ({"messages": [asks("x")]}, "has no message of the assistant"),
        ({"messages": [asks("x"), says(" ")]}, r"message 1 \(assistant\) is empty"),
        (
            {"messages": [asks({"type": "image", "image": "a", "url": "b"}), says("x")]},
            "the unknown key 'image' in",
        ),
        ({"messages": [asks(video("a", video_start=3)), says("x")]}, "has the unknown key 'video_start' in"),
        ({"messages": [], "conversations": []}, "has messages and conversations, so its format is ambiguous"),
        ({"conversations": "x"}, "conversations is not a list"),
        (llava("x", "y") | {"conversations": [{"from": "bot", "value": "x"}]}, "turn 0 of conversations is from 'bot'"),
        (llava("What?", "It.", image="1.png"), r"has 1 files \(1.png\) and the placeholders none; write one for each"),
        (llava("<image><image>", "It.", image="1.png"), "and the placeholders <image>, <image>"),
        (llava("<image>", "It.", image="1.png", video="a.mp4"), r"has 2 files \(1.png, a.mp4\)"),
        (llava("<image>", "It.", image="1.png", images=["2.png"]), "has both 'image' and 'images'"),
        (llava("<image>", "It.", image=3), "image is 3; expected the path of a file"),
        (
            {"question": "x", "answer": "y", "videos": ["a.mp4", "b.mp4"], "end": 3},
            "times of a clip and 2 videos; state",
        ),
        ({"question": "x", "answer": "y", "video": "a.mp4", "end": 3, "end_time": 3}, "has both 'end' and 'end_time'"),
        ({"text": "no image"}, "which is not a known format"),
        *(
            (
                record | {key: value},
                f"has {key} {value!r} but shows no video or image, so it would be ignored; give its path by",
            )
            for record in ({"question": "x", "answer": "y"}, llava("x", "y"), {"messages": [asks("x"), says("y")]})
            for key, value in (
                ("video_name", "v_1"),  # ActivityNet-QA
                ("video_idx", "b1"),  # EgoSchema
                ("original_video_filename", "a.mp4"),  # FineVideo
                ("yt_clip_link", "https://youtu.be/a"),  # CinePile
            )
        ),
        ({"question": "x", "answer": "y", "video_id": 6513}, "has video_id 6513 but shows no video"),
        ({"question": "x", "answer": "y", "video_idx": 0}, "has video_idx 0 but shows no video"),
        ({"question": "x", "answer": "y", "has_image": True}, "has has_image True but shows no video"),
        *(
            (
                {"question": "x", "answer": "1", "video": "a.mp4", key: "red"},
                f"has {key} 'red' but no list of options, so",
            )
            for key in ("option", "option 0", "option0", "a0", "A")
        ),
        ({"question": "x", "image": "1.png"}, "question and answer are 'x' and ''; expected two texts"),
        ({"question": "x", "image": "1.png", "answer": 0}, "question and answer are 'x' and 0; expected two texts"),
        (VIDEO_MME | {"answer": None}, "the question has no answer; expected one of answer, correct_choice"),
        (VIDEO_MME | {"answer": "E"}, "answer is 'E', which is none of the options"),
        (VIDEO_MME | {"answer": 4}, "answer is 4, of 4 options"),
        (VIDEO_MME | {"options": ["A", "A"], "answer": "A"}, "answer is 'A', which is ambiguous"),
        (VIDEO_MME | {"options": ["B", "A"], "answer": "A"}, "answer is 'A', which is ambiguous"),
        (VIDEO_MME | {"options": "A. One B. Two"}, "options is 'A. One B. Two'; expected a list"),
    ],
)
def test_unknown_or_ambiguous_record_is_refused(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_record(record)


@pytest.mark.parametrize(
    "record",
    [
        {"question": "x", "answer": "y", "video_name": "", "option": "", "a0": []},  # empty cells of a table
        {"question": "x", "answer": "y", "video_id": math.nan, "fps": math.nan, "end": math.nan, "a0": math.nan},
        {"question": "x", "answer": "y", "num_images": 0, "has_video": False, "tools": False, "start": 0},
        {"question": "x", "answer": "y", "correct_answer": "y"},
        {"messages": [asks("x"), says("y")], "start_time": "2024-01-01T00:00:00Z", "end_time": "2024-01-01 01:00"},
        {"messages": [asks("x"), says("y")], "num_videos": 0, "is_video": False, "start_time": "0:00", "fps": math.nan},
        {"messages": [asks(video("a.mp4"), "x"), says("y")], "video_path": "a.mp4", "videos": ["a.mp4"], "start": 0.0},
        {"question": "x", "answer": "y", "video": "a.mp4", "video_name": "a", "image_id": 7},
        {"messages": [asks(video("a.mp4"), "x"), says("y")], "video_id": "a", "a0": "z"},
        llava("x", "y", image="", clips_score=0.5, answer_type="A"),
    ],
)
def test_keys_that_name_nothing_further_are_ignored(record: Any) -> None:
    assert read_record(record).turns[-1].text == "y"


def test_choices_have_texts_letters_and_categories() -> None:
    choice = read_choice(VIDEO_MME)
    options = ("One.", "Two.", "Three.", "Four.")
    assert choice == MultipleChoice(
        question="How many doors open?", options=options, answer=2, category="Counting Problem"
    )
    assert choice.letters == ("A", "B", "C", "D")
    assert (
        choice.prompt("Q: {question} {options} A:")
        == "Q: How many doors open? A. One.\nB. Two.\nC. Three.\nD. Four. A:"
    )
    for answer in ("C", "(C)", "C.", "C. Three.", "Three.", 2):
        assert read_choice(VIDEO_MME | {"answer": answer}).answer == 2
    assert read_choice({"question": "x", "choices": {"A": "one", "B": "two"}, "answer": "two"}).answer == 1
    assert read_choice({"question": "x", "options": ["one", "two"]}).answer is None


def test_elements_of_a_json_list_have_their_numbers_and_lines_theirs(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([llava("x", "y"), {"b": "]"}, 3], indent=2))
    records = open_records(tmp_path / "a.json")
    assert len(records) == 3 and [records.record(i) for i in range(3)] == [llava("x", "y"), {"b": "]"}, 3]
    assert [records.place(i) for i in (0, 2)] == [f"{tmp_path / 'a.json'}, record {number}" for number in (1, 3)]
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert open_records(tmp_path).place(0) == records.place(0)
    (tmp_path / "a.data").write_bytes(b'{"a": 1}\n\x1f\x8b\n')
    lines = open_records(tmp_path / "a.data")
    assert (lines.record(0), lines.place(1)) == ({"a": 1}, f"{tmp_path / 'a.data'}:2")
    with pytest.raises(DataError, match="^not JSON"):
        lines.record(1)
    (tmp_path / "a.json").write_text('\ufeff[{"a": 1}]')
    assert open_records(tmp_path / "a.json").record(0) == {"a": 1}


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (
            {"a.jsonl": "{}", "b.json": "[1]"},
            ".",
            r"several splits or subsets; give one of them: .*jsonl, .*b",
        ),
        ({"readme.txt": "x"}, ".", r"no data set was found there \(found: readme.txt\); expected JSONL, a JSON list"),
        ({"cats/1.png": "x"}, ".", r"it has media such as 1.png but no texts; add metadata.jsonl"),
        ({"dataset_dict.json": '{"splits": ["train", "test"]}'}, ".", "several splits; give one of them: .*/train, "),
        ({"data/test-0.parquet": "", "data/train-0.parquet": ""}, ".", "several splits or subsets; give one of them: "),
        ({"s-000.tar": "x"}, "s-{000..002}.tar", "2 of 3 files are missing, first .*s-001.tar"),
        ({"a.jsonl": "{}"}, "*.parquet", "no file matches; check the pattern"),
        ({"a.jsonl": "{}"}, "b.jsonl", r"cannot be read \(No such file or directory\); expected JSONL"),
        ({"a.jsonl": "{}", "b.csv": "x"}, "*.*", r"matches files of several kinds \(.csv, .jsonl\)"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path: Path, files: dict[str, str], name: str, message: str) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        open_records(tmp_path / name)
