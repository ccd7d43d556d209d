"""Layer: loopback ranks. Frames of unequal size through features, strategies, caches, decoding and the record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense_attention import dense_attention
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.inference.attention_record import AttentionRecord, RowRecorder
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import Frames
from mllm_seqpar.runtime.offload import HostFeatures
from mllm_seqpar.runtime.projections import KVProjection
from mllm_seqpar.runtime.sharded_call import sharded_call
from mllm_seqpar.runtime.text import TextShards
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameSizes, frame_range, take_spans

F64 = torch.float64
COUNTS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
SIZES, ROWS, HEADS, DIM, WIDTH = FrameSizes(7, COUNTS), 11, 4, 4, 6
UNITS = SIZES.count()


def inputs() -> tuple[Tensor, Tensor, FrameMask, Tensor]:
    """q, features (tokens, 1, width), the mask of all rows and what it shows."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, ROWS, DIM, dtype=F64, generator=g)
    features = torch.randn(UNITS, 1, WIDTH, dtype=F64, generator=g)
    stop = torch.randint(0, 8, (2, ROWS), generator=g).sort(1).values  # a prefix of the frames, as in MOSS-VL
    mask = FrameMask.from_intervals(torch.zeros_like(stop), stop, COUNTS, 7)
    return q, features, mask, mask.table().repeat_interleave(COUNTS, -1)


def projection() -> KVProjection:
    """The same for every rank, which is a thread."""
    g, layers = torch.Generator().manual_seed(1), []
    for _ in range(2):
        layers.append(nn.Linear(WIDTH, 2 * DIM, bias=False, dtype=F64))
        layers[-1].weight.data = torch.randn(2 * DIM, WIDTH, dtype=F64, generator=g)
    return KVProjection(layers, DIM)


def keys_values(project: KVProjection, features: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (p(features).flatten(0, 1).unflatten(-1, (2, DIM)).transpose(0, 1)[None] for p in project.modules)
    return k, v


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["lv-xattn", "ring", "mesh", "replicate", "offload"])
def test_attention_and_gradients_over_sharded_features(strategy: str, n: int) -> None:
    q, features, mask, visible = inputs()
    do = torch.randn_like(q)
    given, project = features.clone().requires_grad_(), projection()
    leaf = q.clone().requires_grad_()
    expected, _ = dense_attention(leaf, *keys_values(project, given), visible, 0.5)
    expected.backward(do)
    layout = FRAME_LAYOUTS[n % 2]
    options = {"visual_offload": "cpu"} if strategy == "offload" else {"strategy": strategy}

    def run(comm: Communicator) -> dict[str, Tensor]:
        context = SeqParContext(comm, SeqParConfig(**options))
        text = TextShards(2, ROWS, comm, "zigzag")
        own = SIZES.units(SIZES.spans(n, layout)[comm.rank])
        local = take_spans(features, own).clone().requires_grad_()
        index, projected = take_spans(torch.arange(UNITS), own), projection()
        if strategy == "offload":
            visual: VisualFeatures = HostFeatures.of(local.detach(), index, UNITS, F64, layout)
        else:
            visual = VisualFeatures(local, index, UNITS, layout=layout)
        frames = Frames.of_shards(visual, mask, text, SIZES)
        assert frames.key_lengths == tuple(SIZES.count(spans) for spans in SIZES.spans(n, layout))
        if strategy == "replicate" and n > 1:
            frames = frames.gathered(visual, comm, torch.arange(UNITS))
        state = ForwardState(context, text=text, frames=frames)
        rows = text.shard(q, 2).requires_grad_()
        o = state.attend(rows, [state.frame_keys(rows, 0, projected)], 0.5)
        o.backward(text.shard(do, 2))
        weights = torch.stack([p.weight.grad for p in projected.modules])
        grads = {"dq": text.unshard(rows.grad, 2), "dw": comm.all_reduce(weights) if n > 1 else weights}
        found = {"o": text.unshard(o.detach(), 2), **grads}
        return found if strategy == "offload" else found | {"dy": local.grad}

    exact = {"o": expected.detach(), "dq": leaf.grad, "dw": torch.stack([p.weight.grad for p in project.modules])}
    for rank, found in enumerate(run_loopback(n, run)):
        for name, right in exact.items():
            torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-9)
        if "dy" in found:
            own = SIZES.units(SIZES.spans(n, layout)[rank])
            torch.testing.assert_close(found["dy"], take_spans(given.grad, own), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("layout", FRAME_LAYOUTS)
def test_decoding_from_a_cache_and_the_attention_to_frames(layout: str, n: int) -> None:
    q, features, mask, visible = inputs()
    q, mask, visible = q[:1, :, -2:], mask.take(torch.tensor([4, 9])), visible[:1, [4, 9]]
    mask = FrameMask(mask.bounds[:, :, :1], mask.sizes)
    k, v = keys_values(projection(), features)
    expected, lse = dense_attention(q, k, v, visible, 0.5)
    scores = 0.5 * q[:, :, 1:] @ k.repeat_interleave(2, 1).mT
    shares = (scores - lse[:, :, 1:, None]).exp().mul(visible[:, None, 1:]).mean(1)[0]
    frame = torch.arange(7).repeat_interleave(COUNTS)

    def run(comm: Communicator) -> tuple[Tensor, Any]:
        own = SIZES.units(SIZES.spans(n, layout)[comm.rank])
        visual = VisualFeatures(take_spans(features, own), take_spans(torch.arange(UNITS), own), UNITS, layout=layout)
        cache, context = VisualKVCache(7, SIZES, 1, visual), SeqParContext(comm, SeqParConfig())
        with torch.no_grad():
            record = AttentionRecord(comm)
            recorder = RowRecorder(cache=cache, mask=mask, row=-1, length=2, sharded=False)
            record._passes.append(recorder)
            state = ForwardState(context, frames=cache.frames_of(mask, comm), text_length=2, recorder=recorder)
            o = state.attend(q, [state.frame_keys(q, 0, projection())], 0.5)
            return o, record.result()

    for o, result in run_loopback(n, run):
        torch.testing.assert_close(o, expected.detach(), rtol=1e-9, atol=1e-9)
        right = torch.zeros(1, 7, dtype=F64).index_add_(1, frame, shares.detach())
        torch.testing.assert_close(result.frames.double(), right, rtol=1e-6, atol=1e-7)
        assert torch.equal(result.visible[0], mask.table()[0, 1])


@pytest.mark.parametrize("n", [1, 3])
def test_functional_decoding(n: int) -> None:
    q, features, mask, visible = inputs()
    k, v = keys_values(projection(), features)
    expected, _ = dense_attention(q, k, v, visible, 0.5)

    def run(comm: Communicator) -> Tensor:
        own = SIZES.units(SIZES.spans(n)[comm.rank])
        with torch.no_grad():
            return decode_attention(q, take_spans(k, own, 2), take_spans(v, own, 2), mask=mask, group=comm)

    for found in run_loopback(n, run):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("encodes", [False, True])
def test_sharded_call(encodes: bool) -> None:
    q, features, mask, visible = inputs()
    expected, _ = dense_attention(q, *keys_values(projection(), features), visible, 0.5)
    starts = torch.tensor([0, *COUNTS.cumsum(0).tolist()])

    def run(comm: Communicator) -> Tensor:
        context, own = SeqParContext(comm, SeqParConfig()), frame_range(7, comm, COUNTS)
        if encodes:  # of the numbers of frames
            frames = torch.arange(7)

            def encode(some: Tensor) -> Tensor:
                return torch.cat([features[starts[f] : starts[f + 1]] for f in some] or [features[:0]])

            state = sharded_call(context, frames, mask, encode=encode)
        else:
            state = sharded_call(context, features[starts[own.start] : starts[own.stop]], mask)
        rows = state.text.shard(q, 2)
        return state.text.unshard(state.attend(rows, [state.frame_keys(rows, 0, projection())], 0.5), 2)

    for found in run_loopback(3, run):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_an_int_gives_the_bits_of_a_tensor_of_equal_counts() -> None:
    q, features, _, _ = inputs()
    stop = torch.arange(ROWS).clamp(max=6).expand(2, -1)
    k, v = keys_values(projection(), features[:24])
    results = []
    for tokens in (4, torch.full((6,), 4)):
        mask = FrameMask.from_intervals(torch.zeros_like(stop), stop, tokens, 6)
        with torch.no_grad():
            results.append(decode_attention(q, k, v, mask=mask, group="self"))
    assert torch.equal(*results)
