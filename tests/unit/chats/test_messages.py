"""Layer: pure Python. The rules of messages that processors, data sets and the collator share."""

from typing import Any

import pytest

from mllm_seqpar.chats.messages import message_parts, order_fault
from mllm_seqpar.errors import DataError

MEDIA = {"image": ("path",), "video": None}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_text_is_one_part_and_null_is_an_absent_key() -> None:
    assert message_parts(0, {"role": "assistant", "content": "x"}, MEDIA) == [{"type": "text", "text": "x"}]
    parts = [{"type": "image", "path": "a", "url": None}, {"type": "video", "any": 1}, {"type": "text", "text": ""}]
    assert message_parts(0, user(*parts), MEDIA) == parts


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("x", "message 3 has the role None; expected one of system, user, assistant"),
        ({"role": "tool", "content": "x"}, "message 3 has the role 'tool'"),
        ({"role": "user"}, "message 3 holds None; expected a text or a list of parts"),
        (user(), r"message 3 holds \[\]"),
        (user("x"), r"message 3 \(user\) holds 'x', which is not a part; a part has the type text, image, video"),
        (user({"type": []}), r"message 3 \(user\) holds {'type': \[\]}"),
        (user({"type": "text", "text": None}), "holds a text part without text"),
        (user({"type": "image", "url": "a"}), r"unknown key 'url' in .*; a part of type image takes"),
        ({"role": "system", "content": [{"type": "video"}]}, r"\(system\) has a part of type video; only a user"),
        ({"role": "assistant", "content": [{"type": "image"}]}, r"\(assistant\) has a part of type image; only a user"),
    ],
)
def test_malformed_messages_are_refused(message: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        message_parts(3, message, MEDIA)


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
    ],
)
def test_order_that_no_chat_has_is_a_fault(roles: str, fault: str | None) -> None:
    found = order_fault(roles.split())
    assert found is None if fault is None else (found or "").startswith(fault)
    asked = order_fault(roles.split(), answered=False)  # a question may be the last message
    assert asked == (None if roles == "user assistant user" else found)
