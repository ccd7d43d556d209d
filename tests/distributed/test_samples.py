"""Layer: one process, and gloo ranks. The Python samples of the documentation run; see also `test_examples`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_examples import ROOT, blocks
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from mllm_seqpar import attention, patch_model, patches, unpatch_model
from mllm_seqpar.adapting import FrameMask, sharded_call
from mllm_seqpar.families import FamilySpec
from mllm_seqpar.integrations.transformers.attention import merge_heads, split_heads, use_seqpar_attention
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.patches.mplug_owl3.testing import Case, inputs_of, tiny_model
from mllm_seqpar.patching import registry
from mllm_seqpar.patching.patch import patch_of
from mllm_seqpar.runtime.kv_projection import KVProjection
from ranks import ranks

PATCHED = ("docs/concepts/decoding.md", "docs/concepts/evidence.md")
"""Pages whose samples begin with a patched model."""
ON_FOUR_RANKS = (
    *(f"docs/concepts/{name}.md 0" for name in ("ring", "ulysses", "lv_xattn", "recomputation", "replicate")),
    *(f"docs/concepts/{name}.md 0" for name in ("chunked_mlp", "checkpointing", "decoding", "evidence", "auto")),
    *("docs/concepts/evidence.md 1", "README.md 0", "docs/index.md 0"),
)
ON_EIGHT_RANKS = ("docs/concepts/mesh.md 0", "docs/get_started.md 1")
ON_ONE_RANK = ("docs/checkpoints.md 0", "docs/guides/chat.md 0")
ELSEWHERE = {
    "README.md 1": "test_examples",
    "docs/get_started.md 0": "test_examples",
    "docs/concepts/auto.md 1": "test_docs",
    "docs/guides/own_model.md 0": "test_own_adapter",
    **{f"docs/guides/add_a_family.md {i}": "test_adapter_of_the_guide" for i in range(3)},
}
"""Samples that another test runs."""


def patch_again(model: nn.Module, **options: Any) -> nn.Module:
    """Patch a model, in a sample that shows several ways to do so."""
    return patch_model(unpatch_model(model) if patch_of(model) else model, **options)


def run_sample(rank: int, world: int, name: str, code: str) -> None:
    case = Case(frames=(3,), length=16, labels=None)
    model, (q, k, v) = tiny_model().train(), (torch.randn(1, heads, 16, 8) for heads in (8, 8, 8))
    given = {name: getattr(attention, name) for name in attention.__all__} | {"patch_model": patch_again}
    if name.startswith(PATCHED):
        patch_model(model.eval())
    exec(
        compile(code, name, "exec"), given | {"model": model, "q": q, "k": k, "v": v, "inputs": inputs_of(case, model)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_FOUR_RANKS, *ON_EIGHT_RANKS])
def test_sample_runs_on_several_ranks(name: str) -> None:
    code = blocks()[name].replace('"configs/', f'"{ROOT}/configs/').replace("=256", "=8").replace("=64", "=8")
    ranks(8 if name in ON_EIGHT_RANKS else 4).run(run_sample, name, code)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_sample_runs_in_one_process(name: str, training_files: Path) -> None:
    from mllm_seqpar.models.loading import load_model, load_processor

    directory = training_files / "model"
    code = blocks()[name].replace('"DIR"', repr(str(directory)))
    code = code.replace('"movie.mp4"', repr(str(next(training_files.rglob("*.mp4"))))).replace("Sampling()", "SAMPLING")
    given: dict[str, Any] = {
        "model": patch_model(load_model(str(directory)).eval()),
        "processor": load_processor(str(directory)),
    }
    if "SAMPLING" in code:
        from mllm_seqpar.inference import Sampling

        given["SAMPLING"] = Sampling(max_new_tokens=3)
    exec(compile(code, name, "exec"), given)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.cross_attn = LlamaAttention(config, 0), LlamaMLP(config), CrossAttention()


class CrossAttention(nn.Module):
    head_dim, scaling = 8, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(hidden_states), self.k_proj(features), self.v_proj(features)
        o = F.scaled_dot_product_attention(*(split_heads(x, self.head_dim) for x in (q, k, v)), scale=self.scaling)
        return self.o_proj(merge_heads(o))


class MyModelForConditionalGeneration(nn.Module):
    """A model with the modules that the guide names."""

    __module__ = "transformers.my_model"

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, attn_implementation="sdpa")
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([Layer(config) for _ in range(2)])})
        self.decoder.layers = self.decoder["layers"]

    def generate(self) -> None: ...

    _valid_auto_compile_criteria = _expand_inputs_for_generation = generate


def test_adapter_of_the_guide_patches_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    registry_sample, adapter, cross_attention = (blocks()[f"docs/guides/add_a_family.md {i}"] for i in range(3))
    names: dict[str, Any] = {"functools": functools, "is_instance_by_name": registry.is_instance_by_name}
    names |= {"use_seqpar_attention": use_seqpar_attention, "patch_generate": patch_generate}
    names |= {"split_heads": split_heads, "merge_heads": merge_heads, "KVProjection": KVProjection}
    names |= {"model_forward": lambda model, context: None, "FamilySpec": FamilySpec}
    exec(registry_sample.replace("...", "*DEFINED"), names | {"DEFINED": patches.FAMILIES})
    exec(adapter + cross_attention, names)
    monkeypatch.setattr(registry, "_registered", {"My family": names["adapter"]()})
    model = MyModelForConditionalGeneration()
    patch_model(model)
    context = patch_of(model).context  # type: ignore[union-attr]
    features, x = torch.randn(3, 2, 16), torch.randn(1, 5, 16)
    everything = FrameMask.from_dense(torch.ones(1, 5, 3, dtype=torch.bool), 2)
    layer = model.decoder.layers[1].cross_attn  # type: ignore[union-attr, index]
    found, _ = layer(x, seqpar=sharded_call(context, features, everything))
    unpatch_model(model)
    assert found.allclose(layer(x, features.flatten(0, 1)[None]), atol=1e-6)
