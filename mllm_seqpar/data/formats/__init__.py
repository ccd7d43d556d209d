"""Data sets in common formats, read as the chats of `chat_format`: how records are stored, and what they look like.

`open_records` detects how a data set is stored (JSONL, JSON, parquet, arrow, tar shards, a folder with metadata) and
returns its records. `to_chat` detects what one record looks like (a chat, LLaVA, OpenAI, a question, a caption) and
converts it. If a format is unknown, the error of both names what was found.
"""

from .choices import DEFAULT_TEMPLATE, MultipleChoice, check_template, read_choice
from .dialects import to_chat
from .opening import open_records
from .records import Records

__all__ = [
    "DEFAULT_TEMPLATE",
    "MultipleChoice",
    "Records",
    "check_template",
    "open_records",
    "read_choice",
    "to_chat",
]
