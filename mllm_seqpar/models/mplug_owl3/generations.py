"""What the processors of the published generations differ in, and where a processor's options come from.

Published directories hold no preprocessor_config.json and no processor_config.json: their remote code builds the
processor. The names of the weights show the generation, and so which processor the model was trained with.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import cached_file

from mllm_seqpar.errors import DataError

from .checkpoint import checkpoint_keys, gate_of

PUBLISHED: dict[str | None, dict[str, Any]] = {
    "per_head": {"image_size": 384, "video_span": False, "cut_template": "v2"},  # 7B-240728
    "vector": {"image_size": 384, "video_span": True, "cut_template": "v3"},  # 241014
    None: {"image_size": 378, "video_span": True, "cut_template": "v3"},  # 241101
}
"""Options of a processor, by the gate of its model."""


def processor_options(
    path: str | os.PathLike, files: Mapping[str, Sequence[str]], explicit: Mapping[str, Any], **hub: Any
) -> dict[str, Any]:
    """Return the options that are passed, that files state, or that the generation of the weights has, in this order.

    Args:
        path: directory or hub repository.
        files: names of JSON files, and the options that each may state.
        explicit: the options that are passed.
        **hub: as for `checkpoint_keys`.

    Raises:
        DataError: an option that neither is passed nor stated, and no weights that show the generation.
        ConfigError: the weights are those of no published generation.
    """
    options: dict[str, Any] = {}
    for name, allowed in files.items():
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
        if file is not None:
            with open(file, encoding="utf-8") as stream:
                stated = json.load(stream)
            options |= {option: stated[option] for option in allowed if option in stated}
    options |= explicit
    lacking = [name for name in PUBLISHED[None] if name not in options]
    if not lacking:
        return options
    try:
        keys = checkpoint_keys(path, **hub)
    except DataError as error:
        known = ", ".join(str({name: published[name] for name in lacking}) for published in PUBLISHED.values())
        raise DataError(
            f"{os.fspath(path)!r} has no file that states the processor's {', '.join(lacking)}, and no weights that "
            f"show its generation ({error}); pass what the model was trained with: one of {known}"
        ) from error
    return PUBLISHED[gate_of(keys)] | options
