"""Chats that show all that a chat can: videos, images between words, several turns, words alone."""

import json
from pathlib import Path
from typing import Any


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def image(number: int) -> dict[str, str]:
    return {"type": "image", "path": f"{number}.png"}


def says(value: str) -> dict[str, str]:
    return {"role": "assistant", "content": value}


def asks(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


VIDEO = {"type": "video", "path": "clip.mp4", "num_frames": 3}
CHATS: dict[str, list[dict[str, Any]]] = {
    "a video": [asks(VIDEO, text("What is it?")), says("A dot.")],
    "an image within text": [asks(text("Here "), image(0), text("or "), image(1), text("?")), says("The second.")],
    "turns": [
        {"role": "system", "content": "Be brief."},
        asks(image(2), VIDEO, text("First?")),
        says("Red."),
        asks(text("And now? "), image(1)),
        says("Blue, I think."),
    ],
    "words alone": [asks(text("Say hello.")), says("Hello!")],
}


def write_chats(path: Path, chats: list[list[dict[str, Any]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path
