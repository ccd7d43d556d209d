"""Data sets as people have them, read as the chats of `chat_format`: where records are stored, and what they look like.

`open_records` finds out how a data set is stored (JSONL, JSON, parquet, arrow, tar shards, a folder with metadata) and
returns its records. `to_chat` finds out what one record looks like (a chat, LLaVA, OpenAI, a question, a caption) and
converts it. Both name what they found if they do not know it.
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
