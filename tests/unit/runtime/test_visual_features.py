"""Layer: one process. Keys projected from the shared features, dropped after forward, recomputed in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense_attention import dense_attention
from memory_meters import saved
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.runtime import visual_features as visual
from mllm_seqpar.runtime.projections import FunctionProjection
from mllm_seqpar.runtime.visual_features import RecomputedKeys, VisualFeatures, unit_chunks
from mllm_seqpar.sharding import frame_bounds
from nccl_model import run_nccl_model
from tolerances import EXACT, assert_as_near_as_unpatched, relative_error

pytestmark = pytest.mark.rounding

HEADS, GROUPS, DIM, WIDTH, TOKENS = 4, 2, 8, 12, 3


class Projector(nn.Module):
    """A layer's projection of features to K and V: norm, linear, an adapter with dropout, the position of a frame."""

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * GROUPS * DIM)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * GROUPS * DIM, bias=False)
        self.dropout = nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(seed)  # not the global one, which the ranks' threads share
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)

    def forward(self, features: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(features)
        y = self.kv(y) + self.lora_b(self.dropout(self.lora_a(y)))
        y = y * (1 + 0.1 * index[:, None, None])
        k, v = y.view(1, -1, GROUPS, 2, DIM).transpose(1, 2).unbind(-2)
        return k, v


@dataclass(frozen=True)
class Setting:
    frames: int = 7
    layers: int = 2
    frozen: tuple[str, ...] = ()
    features_need_grad: bool = True
    recompute: bool = True
    autocast: bool = False
    tile: str = "lv"


def whole(setting: Setting) -> tuple[Tensor, Tensor]:
    """All ranks' features and rows (B, H, S, D)."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(setting.frames, TOKENS, WIDTH, generator=generator)
    return features, torch.randn(2, HEADS, 12, DIM, generator=generator)


def modules(setting: Setting) -> list[Projector]:
    made = [Projector(seed=seed) for seed in range(setting.layers)]
    for module in made:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (setting.frozen and name.startswith(setting.frozen)))
    return made


def call_spec(rows: Tensor, lengths: tuple[int, ...], tile: tuple[int, int] = (1, 1)) -> CallSpec:
    return CallSpec(tile, BlockMasks.full(rows.shape[0], rows.shape[2], lengths), lengths, torch.float32)


def source_of(spec: CallSpec, shared: VisualFeatures, module: Projector, recompute: bool) -> RecomputedKeys | GivenKeys:
    if recompute:
        return RecomputedKeys(spec, shared, FunctionProjection(module, [module]), torch.float32)
    return GivenKeys(spec, *(x.float() for x in module(shared.features, shared.index)))


def results(o: Tensor, q: Tensor, features: Tensor, made: list[Projector]) -> dict[str, Any]:
    o.square().sum().backward()
    grads = {f"{i}.{n}": p.grad for i, m in enumerate(made) for n, p in m.named_parameters()}
    return {"o": o.detach(), "dq": q.grad, "features": features.grad, "parameters": grads}


def run(comm: Communicator, setting: Setting) -> dict[str, Any]:
    """o of this rank's rows, and the gradients of its features and of all parameters."""
    features, rows = whole(setting)
    bounds = frame_bounds(setting.frames, comm.size)
    mine = slice(*bounds[comm.rank])
    y = features[mine].clone().requires_grad_(setting.features_need_grad)
    q = o = rows[:, :, torch.arange(12).chunk(comm.size)[comm.rank]].clone().requires_grad_()
    shared = VisualFeatures(y, torch.arange(setting.frames)[mine], setting.frames)
    lengths = tuple((stop - start) * TOKENS for start, stop in bounds)
    spec = call_spec(q, lengths, (comm.size, 1) if setting.tile == "lv" else (1, comm.size))
    made = modules(setting)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        for module in made:
            source = source_of(spec, shared, module, setting.recompute)
            o = o + attend(o, [[source]], rows="sharded", comm=comm, scale=DIM**-0.5)[0][0]
    return results(o, q, y, made)


def dense(setting: Setting) -> dict[str, Any]:
    """The same by one dense float64 attention, all layers' keys as ordinary tensors."""
    features, rows = (x.double() for x in whole(setting))
    made = [module.double() for module in modules(setting)]
    features.requires_grad_(setting.features_need_grad)
    q = o = rows.requires_grad_()
    for module in made:
        k, v = module(features, torch.arange(setting.frames).double())
        o = o + dense_attention(o, k, v, None, DIM**-0.5)[0]
    return results(o, q, features, made)


def check(setting: Setting, n: int) -> None:
    found, reference = run_nccl_model(n, run, setting), dense(setting)
    for name, dim in (("o", 2), ("dq", 2), ("features", 0)):
        parts = [result[name] for result in found]
        if reference[name] is None:
            assert parts == [None] * n
        else:
            assert relative_error(torch.cat(parts, dim=dim), reference[name]) <= EXACT[torch.float32], name
    for name, grad in reference["parameters"].items():
        of_ranks = [result["parameters"][name] for result in found]
        if grad is None:
            assert of_ranks == [None] * n, f"{name} is frozen"
        else:
            assert relative_error(sum(of_ranks), grad) <= EXACT[torch.float32], name


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("tile", ["lv", "ring"])
def test_gradients_of_features_projections_and_adapters_are_summed_over_layers(tile: str, n: int) -> None:
    for frames in (7, 2, 1):
        check(Setting(frames=frames, tile=tile), n)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(frozen=("kv", "norm")),  # LoRA
        Setting(frozen=("norm", "kv", "lora_a", "lora_b")),  # only the features have gradients
        Setting(features_need_grad=False),
        Setting(frozen=("norm", "kv", "lora"), features_need_grad=False),  # only q learns
        Setting(recompute=False),
    ],
)
def test_frozen_parameters_get_no_gradient(setting: Setting) -> None:
    check(setting, 3)


def test_chunks_of_frames_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visual, "CHUNK_BYTES", 2 * TOKENS * WIDTH * 4)
    chunks = unit_chunks(torch.zeros(7, TOKENS, WIDTH))
    assert [chunk.stop - chunk.start for chunk in chunks] == [2, 2, 2, 1]
    check(Setting(), 2)


@pytest.mark.parametrize("frames_at_once", [1, 3, 100])
def test_dropout_is_replayed_in_recomputation(frames_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain rule holds for one function only: what is differentiated must be what gave v in the forward pass."""
    monkeypatch.setattr(visual, "CHUNK_BYTES", frames_at_once * TOKENS * WIDTH * 4)
    module = Projector(dropout=0.5)
    features = torch.randn(5, TOKENS, WIDTH)
    shared = VisualFeatures(features, torch.arange(5), 5)
    spec = call_spec(torch.zeros(1, 1, 2, 1), (15,))
    source, other = (source_of(spec, shared, module, True) for _ in range(2))
    first = source.keys_values(source.inputs())
    torch.rand(100)  # other layers use random numbers meanwhile
    *second, input_grads = source.vjp(source.inputs(), [True] * 7)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # v is linear in lora_b: <dv, v> with everything else fixed is <d lora_b, lora_b> plus what kv contributes
    dv = torch.randn_like(first[1])
    _, *grads = input_grads(torch.zeros_like(dv), dv)
    products = {n: (g * p).sum() for (n, p), g in zip(module.named_parameters(), grads, strict=True)}
    found = products["kv.weight"] + products["kv.bias"] + products["lora_b.weight"]
    terms = dv * first[1]
    assert relative_error(found, terms.sum(), terms.norm()) <= EXACT[torch.float32]
    assert not torch.equal(other.keys_values(other.inputs())[0], first[0]), "each layer uses its own random numbers"


def test_autocast_mode_is_restored_in_backward() -> None:
    """Recomputed K and V are those of the forward pass, so gradients are as near to float64 as without it."""
    plain, again = (run_nccl_model(2, run, Setting(autocast=True, recompute=r)) for r in (False, True))
    assert all(torch.equal(a["o"], b["o"]) and torch.equal(a["dq"], b["dq"]) for a, b in zip(plain, again, strict=True))
    exact = dense(Setting())["parameters"]
    sums = [{name: sum(rank["parameters"][name] for rank in ranks) for name in exact} for ranks in (again, plain)]
    assert_as_near_as_unpatched(*sums, exact)
    assert not torch.equal(plain[0]["o"], run_nccl_model(2, run, Setting())[0]["o"]), "autocast changed nothing"


def saved_per_layer(frames: int, recompute: bool) -> int:
    """Bytes of all storages that autograd saves, without those of the features and parameters."""
    module = Projector()
    y = torch.randn(frames, TOKENS, WIDTH, requires_grad=True)
    shared = VisualFeatures(y, torch.zeros(frames, dtype=torch.int64), frames)
    q = torch.randn(1, HEADS, 6, DIM, requires_grad=True)

    def attention() -> Tensor:
        source = source_of(call_spec(q, (frames * TOKENS,)), shared, module, recompute)
        return attend(q, [[source]], rows="sharded", comm=as_communicator(None), scale=1.0)[0][0]

    return saved(attention, y, *module.parameters())


def test_saved_bytes_do_not_grow_with_the_video() -> None:
    row = HEADS * 6 * 4
    expected = row * DIM + row * DIM + row  # q, o, log-sum-exp in float32
    assert [saved_per_layer(frames, recompute=True) for frames in (8, 16, 64)] == [expected] * 3
    few, many = (saved_per_layer(frames, recompute=False) for frames in (8, 16))
    assert many - few >= 8 * TOKENS * 2 * GROUPS * DIM * 4, "K and V at least"


@pytest.mark.parametrize(("frozen", "features_need_grad"), [(True, False), (False, False), (True, True)])
def test_frozen_projection_is_computed_in_chunks_in_grad_mode(
    frozen: bool, features_need_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visual, "CHUNK_BYTES", 2 * TOKENS * WIDTH * 4)
    module, chunks = Projector().requires_grad_(not frozen), list[int]()

    def project(features: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        chunks.append(features.shape[0])
        return module(features, index)

    features = torch.randn(7, TOKENS, WIDTH).requires_grad_(features_need_grad)
    shared = VisualFeatures(features, torch.arange(7), 7)
    k, v = shared.keys_values(FunctionProjection(project, [module]), torch.float32)
    trains = not frozen or features_need_grad
    assert chunks == ([7] if trains else [2, 2, 2, 1])
    assert (k.requires_grad, v.requires_grad) == (trains, trains)
    for x, expected in zip((k, v), module(features, shared.index), strict=True):
        assert relative_error(x.detach(), expected.detach().double()) <= EXACT[torch.float32]


def test_tensor_of_a_hook_on_a_frozen_projection_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a steering vector. It is no parameter of the projection, and the graph alone shows that it is trained."""
    monkeypatch.setattr(visual, "CHUNK_BYTES", 2 * TOKENS * WIDTH * 4)
    module, added = Projector().requires_grad_(False), torch.zeros(2 * GROUPS * DIM, requires_grad=True)
    module.kv.register_forward_hook(lambda _, args, out: out + added)
    features = VisualFeatures(torch.randn(7, TOKENS, WIDTH), torch.arange(7), 7)
    found, expected = [
        torch.autograd.grad((k.sin().sum() + v.cos().sum()), added)[0]
        for k, v in (
            features.keys_values(FunctionProjection(module, [module]), torch.float32),
            module(features.features, features.index),
        )
    ]
    assert expected.abs().max() > 1 and relative_error(found, expected.double()) <= EXACT[torch.float32]
