"""Layer: one process, loopback ranks. How many bytes the visual tokens of a decoder-only model take on a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import QWENS
from family_harness import family_module, on_ranks
from memory_meters import Peak
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.runtime import visual_tokens
from mllm_seqpar.runtime.visual_tokens import FrameTokens, VisualTokenLayout
from mllm_seqpar.sharding import sequence_positions

INDEX = 8
"""Bytes of an index."""


@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (2, "contiguous"), (4, "zigzag")])
def test_exchange_allocates_its_results_and_a_piece(size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 tokens with four embeddings of 32 channels each, of which a rank sends 16 KiB at a time."""
    tokens, width, count, piece = 4096, 32, 4, 1 << 14
    monkeypatch.setattr(visual_tokens, "PIECE_BYTES", piece)
    numbers = torch.arange(tokens)
    bounds = torch.arange(size + 1) * (tokens // size)
    visual = FrameTokens.of(torch.zeros_like(numbers), numbers, numbers // 16)
    rows = [sequence_positions(tokens, rank, size, layout) for rank in range(size)]
    own = tokens // size * width * count * 4

    def run(comm: Communicator) -> tuple[int, int, Tensor, Tensor]:
        routes = VisualTokenLayout(visual, numbers, bounds).routes(rows, comm.rank)
        local = torch.randn(tokens // size, count * width, requires_grad=True)
        with Peak(local) as forward:
            found = [each.embeddings for each in routes.exchange(local, comm, count)]
        grads = [torch.randn_like(x) for x in found]
        with Peak(*grads) as backward:
            (grad,) = torch.autograd.grad(found, local, grads)
        return forward.bytes, backward.bytes, torch.cat(found, 1).detach(), grad

    for forward, backward, found, grad in run_loopback(size, run):
        assert found.nbytes == grad.nbytes == own
        for peak in (forward, backward):
            assert peak <= own + 2 * 2 * piece + 8 * INDEX * tokens // size, peak / own


@pytest.mark.parametrize(
    ("family", "size", "training"),
    [("qwen2_5_vl", 1, True), ("qwen2_5_vl", 3, False), ("qwen3_vl", 1, False), ("qwen3_vl", 3, True)],
)
def test_layers_begin_with_the_embeddings_of_their_own_rows(family: str, size: int, training: bool) -> None:
    """Beside what a text of the same length holds, only the embeddings that further layers add are alive."""
    video = replace(QWENS[family], frames=(((16, 8, 8),),), length=16 * 20 + 48, train=training)
    video = video.with_options(shard_prompt_from=8)
    text = replace(video, frames=((),))
    visual, further = 16 * 16, family_module(family).tiny_config().text_config.hidden_size * 4
    further *= 2 if family == "qwen3_vl" else 0

    def held(model: Any, inputs: dict[str, Any], comm: Communicator) -> int:
        found: list[int] = []
        model.model.visual.requires_grad_(False)
        given = [x for x in inputs.values() if isinstance(x, Tensor)]
        with Peak(*given, *model.parameters(), *model.buffers()) as meter:

            def count(*_: Any) -> None:
                comm.gather_ints([0])  # the other ranks have taken what this rank sent, which loopback copies
                found.append(meter.live)

            model.model.language_model.layers[0].register_forward_pre_hook(count)
            with torch.set_grad_enabled(training):
                model(**inputs, use_cache=not training)
        return found[0]

    without = on_ranks(size, family, text, held)
    for extra in (a - b for a, b in zip(on_ranks(size, family, video, held), without, strict=True)):
        assert extra <= 1.1 * further * visual / size + 12 * INDEX * visual, extra / visual
