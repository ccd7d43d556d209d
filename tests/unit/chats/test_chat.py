"""Layer: pure Python. The one reader of messages, for data sets (FILES), collators, processors and the server."""

import json
from typing import Any

import pytest

from chats import asks, image, says, text, video
from mllm_seqpar.chats.chat import ANY_MEDIA, FILES, Allowed, Chat, MessageError
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.errors import DataError
from mllm_seqpar.videos.frame_choice import FrameChoice

IN_MEMORY = Allowed(sources={"image": ("image", "path"), "video": ("video", "images")})
MARKED = Allowed(sources=FILES.sources, files=True, marks=("<|image|>",))


@pytest.mark.parametrize(
    ("allowed", "part", "medium"),
    [
        (FILES, image("a.png"), Clip("image", "a.png")),
        (FILES, image("a.png") | {"fps": None, "text": None}, Clip("image", "a.png")),
        (FILES, video("a.mp4", fps=2, end=4.5), Clip("video", "a.mp4", FrameChoice(fps=2, end=4.5))),
        (
            FILES,
            {"type": "video", "images": ["a", "b"], "num_frames": 1},
            Clip("video", ("a", "b"), FrameChoice(num_frames=1)),
        ),
        (IN_MEMORY, {"type": "image"}, Clip("image")),
        (IN_MEMORY, {"type": "image", "image": 7, "path": "a"}, Clip("image", 7)),
        (
            IN_MEMORY,
            {"type": "video", "images": [1, 2], "max_frames": 3},
            Clip("video", [1, 2], FrameChoice(max_frames=3)),
        ),
        (ANY_MEDIA, {"type": "video", "any": 1, "fps": "fast"}, Clip("video")),
    ],
)
def test_part_with_a_medium_is_read(allowed: Allowed, part: Any, medium: Clip) -> None:
    chat = Chat.parse([asks("Before.", part, ""), says("x")], allowed)
    assert chat.turns[0].parts == ("Before.", medium, "") and chat.media == [medium]
    assert chat.turns[1].parts == ("x",)


def test_messages_are_returned_as_they_were_written() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        asks(video("a.mp4", num_frames=3), "What?", image("1.png"), {"type": "video", "images": ["a", "b"]}),
        {"role": "assistant", "content": [text("It.")]},
    ]
    tables = [{**message, "tool_calls": None, "name": None} for message in messages]
    assert Chat.parse(json.loads(json.dumps(tables)), FILES).to_json() == messages
    assert Chat.parse(messages, FILES).turns[1].text == "What?"
    shown = Chat.parse(messages, FILES).with_media([Clip("video"), Clip("image", "2.png"), Clip("image")])
    assert [medium.to_json() for medium in shown.media] == [{"type": "video"}, image("2.png"), {"type": "image"}]
    placeholders = [asks({"type": "image"}, "What?")]
    assert Chat.parse(placeholders).to_json() == placeholders


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


MALFORMED: list[tuple[Allowed, Any, str, tuple[Any, ...]]] = [
    (ANY_MEDIA, "x", "has the role None; expected one of system, user, assistant", ("role",)),
    (ANY_MEDIA, {"role": "tool", "content": "x"}, "has the role 'tool'", ("role",)),
    (ANY_MEDIA, {"role": "user"}, "holds None; expected a text or a list of parts", ("content",)),
    (ANY_MEDIA, {"role": "user", "content": 5}, "holds 5; expected a text or a list of parts", ("content",)),
    (ANY_MEDIA, user(), r"holds \[\]", ("content",)),
    (ANY_MEDIA, user("x"), r"\(user\) holds 'x', which is not a part; a part has the type text, image, v", (0,)),
    (ANY_MEDIA, user(text("x"), {"type": []}), r"\(user\) holds {'type': \[\]}", (1,)),
    (ANY_MEDIA, user({"type": "text", "text": None}), "holds a text part without text", (0, "text")),
    (
        ANY_MEDIA,
        {"role": "system", "content": [{"type": "video"}]},
        r"\(system\) has a part of type video; only a u",
        (0,),
    ),
    (ANY_MEDIA, {"role": "assistant", "content": [{"type": "image"}]}, "has a part of type image; only a user", (0,)),
    (IN_MEMORY, user({"type": "audio"}), "holds {'type': 'audio'}, which is not a part", (0,)),
    (
        IN_MEMORY,
        user({"type": "image", "url": "a"}),
        "has the unknown key 'url' in .*; a part of type image",
        (0, "url"),
    ),
    (
        IN_MEMORY,
        user({"type": "image", "image": 1, "fps": 2}),
        "type image with fps; only a video takes it",
        (0, "fps"),
    ),
    (IN_MEMORY, user({"type": "video", "images": [1], "fps": 2}), "fps of a list of images, which have no time", (0,)),
    (IN_MEMORY, user({"type": "video", "video": 1, "fps": 0}), "fps: 0 is not allowed; give a number", (0, "fps")),
    (FILES, {"role": "user", "content": "x", "images": ["a"]}, r"\(user\) has the unknown key 'images'", ("images",)),
    (FILES, user(text("x") | {"path": "a"}), "has the unknown key 'path' in", (0, "path")),
    (FILES, user(video("a") | {"fpss": 2}), "has the unknown key 'fpss' in", (0, "fpss")),
    (FILES, user({"type": "video"}), 'type video, which needs "path", a file, or "images", a list', (0, "path")),
    (FILES, user({"type": "video", "images": []}), 'type video, which needs "path", a file, or', (0, "path")),
    (FILES, user({"type": "image"}), 'type image, which needs "path", a file$', (0, "path")),
    (FILES, user({"type": "image", "images": ["a"]}), 'type image, which needs "path", a file$', (0, "path")),
    (FILES, user(image("a") | {"path": 3}), 'type image, which needs "path", a file$', (0, "path")),
    (FILES, user(video("a") | {"images": ["a"]}), 'with both "path" and "images"; give one', (0, "images")),
    (FILES, user(image("a") | {"num_frames": 2}), "with num_frames; only a video takes it", (0, "num_frames")),
    (FILES, user(video("a", fps="1")), "with fps: '1' is not allowed; give a number above 0", (0, "fps")),
    (FILES, user(video("a", fps=1, num_frames=1)), "with fps: 1, but num_frames is 1; give one", (0, "fps")),
    (FILES, user(video("a", start=3, end=2)), "with end: 2 is not after the start of the clip, 3", (0, "end")),
    (
        FILES,
        user({"type": "video", "images": ["a"], "end": 1}),
        "with end of a list of images, which have no time",
        (0,),
    ),
    (
        MARKED,
        {"role": "user", "content": "<|image|> what?"},
        r"has <\|image\|> in its text; show media by parts",
        (0, "text"),
    ),
    (
        ANY_MEDIA,
        {"role": "user", "content": "x\ud83d"},
        "has '.ud83d' in its text, which is half of a char",
        (0, "text"),
    ),
    (FILES, user(text("\ude00")), "has '.ude00' in its text", (0, "text")),
    (MARKED, user(text("<|image|>")), r"has <\|image\|> in its text", (0, "text")),
]


@pytest.mark.parametrize(("allowed", "message", "fault", "place"), MALFORMED)
def test_malformed_message_is_refused_with_its_place(allowed: Any, message: Any, fault: str, place: Any) -> None:
    with pytest.raises(MessageError, match=f"^message 1 .*{fault}") as error:
        Chat.parse([asks("Before."), message], allowed)
    assert error.value.place[0] == 1 and error.value.place[1 : 1 + len(place)] == place
    assert str(error.value).endswith(error.value.fault)


@pytest.mark.parametrize("messages", [None, [], "hello", {"role": "user", "content": "x"}])
def test_messages_are_a_list(messages: Any) -> None:
    with pytest.raises(DataError, match='^needs "messages", a list of'):
        Chat.parse(messages)


@pytest.mark.parametrize(
    ("roles", "fault"),
    [
        ("user assistant", None),
        ("system user user assistant user assistant", None),
        ("system system user assistant", None),
        ("assistant user", "message 0 (assistant) is the first message; expected a message of the user"),
        ("system assistant user assistant", "message 1 (assistant) is the first message"),
        ("user assistant assistant", "message 2 (assistant) follows another answer"),
        ("user system assistant", "message 1 (system) follows one of the user; a system prompt comes first"),
        ("user assistant user", "message 2 (user) is the last one and has no answer; add the answer"),
        ("user", "message 0 (user) is the last one and has no answer"),
    ],
)
def test_order_that_no_chat_has_is_refused(roles: str, fault: str | None) -> None:
    def found(**options: bool) -> str:
        try:
            Chat.parse([{"role": role, "content": "x"} for role in roles.split()]).check_order(**options)
        except MessageError as error:
            return str(error)
        return ""

    assert found() == "" if fault is None else found().startswith(fault)
    assert found(answered=False) == ("" if roles.endswith("user") and "(user)" in found() else found())


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([asks("x")], "^has no message of the assistant, so there are no target tokens"),
        ([asks("x"), says(" \n")], r"^message 1 \(assistant\) is empty, which would only train"),
        ([asks("x"), {"role": "assistant", "content": [text(""), text(" ")]}], "^message 1 .assistant. is empty"),
        ([asks("x"), says("y"), asks("z")], "^message 2 .user. is the last one and has no answer"),
    ],
)
def test_chat_without_targets_is_refused(messages: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        Chat.parse(messages).check_targets()
