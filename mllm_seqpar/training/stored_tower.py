"""Training on stored outputs of a frozen vision tower (`finetune --features`).

In the first epoch the tower runs, and its outputs are stored unchanged. Later, frames are not decoded: the model
receives blank images, and the tower's method returns the stored outputs instead of computing them. Modules behind the
tower, such as a projector, run in every pass, so they may be trained.

In a pass, either all ranks compute or all ranks read, because FSDP gathers the weights of a module when it runs;
`BatchReader` agrees on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.chats.batch import ChatBatch
from mllm_seqpar.chats.chat_family import ChatFamily
from mllm_seqpar.chats.clip import FrameSource
from mllm_seqpar.chats.store import TowerStore
from mllm_seqpar.digests import digest_of
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching.registry import find_adapter
from mllm_seqpar.sharding import FrameShard

ARGUMENT = "tower_rows"
"""The name under which a `TowerRows` is among the arguments of a batch."""

_BLANK = "blank"


@lru_cache(maxsize=65_536)
def source_key(source: FrameSource) -> str:
    """Return the name of a source in the store, a digest of its `key`.

    Raises:
        ConfigError: the source has none.
    """
    try:
        return digest_of(source.key())
    except ConfigError as error:
        raise ConfigError(f"--features: {error}; leave it out") from error


@dataclass(frozen=True)
class TowerRows:
    """The frames of this rank in one pass.

    Attributes:
        segments: (key of the source, first row, last row + 1), in the order of the pass; a frame has one row, or as
            many as `ChatFamily.tower_rows` says.
        states: their stored outputs, (rows, ...); None if the tower computes them.
    """

    segments: tuple[tuple[str, int, int], ...]
    states: Tensor | None

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(stop - start for _, start, stop in self.segments)


def has_outputs(arguments: Mapping[str, Any]) -> bool:
    """Return whether a batch has stored outputs of the vision tower instead of its frames."""
    rows = arguments.get(ARGUMENT)
    return rows is not None and rows.states is not None


class TowerReplay:
    """Replaces the vision tower of a model by its stored outputs.

    Raises:
        ConfigError: a part that computes the outputs is trained or random, or the family has no tower that can be
            stored.
    """

    def __init__(self, store: TowerStore, chat_format: ChatFamily, model: nn.Module) -> None:
        if not chat_format.stores_tower:
            raise ConfigError(
                f"--features: outputs of the vision tower of {chat_format.model_class} cannot be stored: its images "
                "have different numbers of patches; leave it out"
            )
        self.store, self._chat_format = store, chat_format
        path, self._method = chat_format.tower
        inner = find_adapter(model)[1]
        self._tower = inner.get_submodule(path)
        # Modules behind the tower run in every pass.
        parts = chat_format.family(inner, None).parts.get("projector", ())
        behind = tuple(name.removeprefix(f"{path}.") for name in parts)
        tensors = ((name, x) for name, x in self._tower.named_parameters() if not name.startswith(behind))
        trained = [name for name, parameter in tensors if parameter.requires_grad]
        if trained:
            raise ConfigError(
                f"--features stores what the vision tower returns, but {len(trained)} of its tensors are trained, such "
                f"as {trained[0]}; freeze it (--freeze vision), or leave out --features"
            )
        config: Any = getattr(self._tower, "config", None)
        values = config.to_dict() if hasattr(config, "to_dict") else {}
        rates = {name: value for name, value in values.items() if "dropout" in name and isinstance(value, (int, float))}
        rates |= {name: module.p for name, module in self._tower.named_modules() if isinstance(module, nn.Dropout)}
        for name, rate in rates.items():
            if rate > 0:
                raise ConfigError(
                    f"--features stores what the vision tower returns, which is random in training ({name} = {rate}); "
                    "set it to 0 in config.json, or leave out --features"
                )

    def rows(self, batch: ChatBatch, shard: FrameShard, read: bool) -> TowerRows:
        """Return this rank's frames of a batch; with `read`, also their outputs if all of them are stored."""
        slots = batch.text.slots
        places = [(source, number) for source in batch.sources for number in range(len(source))]
        segments: list[tuple[str, int, int]] = []
        for slot in chain(*shard.ranges):
            source, number = places[slots[slot]] if slots[slot] >= 0 else (None, 0)
            key, rows = (_BLANK, 1) if source is None else (source_key(source), self._chat_format.tower_rows(source))
            start, stop = number * rows, (number + 1) * rows
            if segments and source is not None and segments[-1][0] == key and segments[-1][2] == start:
                segments[-1] = (key, segments[-1][1], stop)
            else:
                segments.append((key, start, stop))
        states = None
        if read and self.store.shape is not None and all(self.store.has(*segment) for segment in segments):
            parts = [self.store.read(*segment) for segment in segments]
            states = torch.cat(parts) if parts else torch.empty(0, *self.store.shape)
        return TowerRows(tuple(segments), states)

    @contextmanager
    def running(self, rows: TowerRows) -> Iterator[None]:
        """Return a context in which the tower returns the outputs of `rows`, or stores what it computes."""
        compute, states, done = getattr(self._tower, self._method), rows.states, 0
        replaced = vars(self._tower).get(self._method)  # by the autocast of accelerate, or by FSDP
        outputs, order = list[Tensor](), list[int]()

        def returned(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            pixels = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
            if states is None:
                output = compute(*args, **kwargs)
                new = self._chat_format.tower_states(output).detach()
                # Dropout after the tower fills its masks in the order of memory, so the order is stored too.
                strides = new.stride()
                order[:] = sorted(range(new.dim()), key=lambda dim: -strides[dim])
                outputs.append(new.cpu())
                return output
            count = self._chat_format.tower_frames(pixels)
            part = states[done : done + count]
            if len(part) < count:  # a call whose result is dropped, on a rank with fewer frames than others
                part = torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])
            done += count
            moved = copy_to_device(part.to(self.store.dtype), pixels.device)
            ordered = moved.permute(self.store.order).contiguous()
            return self._chat_format.tower_output(
                ordered.permute([self.store.order.index(dim) for dim in range(moved.dim())])
            )

        setattr(self._tower, self._method, returned)
        try:
            yield
        finally:
            if replaced is None:
                delattr(self._tower, self._method)
            else:
                setattr(self._tower, self._method, replaced)
        if not outputs:
            return
        computed, first = torch.cat(outputs), 0
        self.store.create(tuple(computed.shape[1:]), computed.dtype, order)
        for key, start, stop in rows.segments:
            if not self.store.has(key, start, stop):
                self.store.write(key, start, computed[first : first + stop - start])
            first += stop - start
