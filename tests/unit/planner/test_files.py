"""Layer: one process. Files of clusters and models, model directories, and errors for invalid ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clusters import ROUND, with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster, write_cluster
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.records import CONFIGS, find_file
from mllm_seqpar.planner.step_cost import attention_candidates
from mllm_seqpar.planner.workload import Workload


def changed(folder: Path, text: str, old: str, new: str) -> Path:
    """Return a file with `text`, in which `old` is replaced by `new`."""
    assert old in text
    (folder / "c.yaml").write_text(text.replace(old, new))
    return folder / "c.yaml"


def test_write_and_read_give_an_equal_cluster(tmp_path: Path) -> None:
    for cluster in (ROUND, with_(network_link_per_gpu=1e7, peak_flops=1e15, overlap=0.5, source="measured: here")):
        write_cluster(cluster, tmp_path / "c.yaml")
        assert read_cluster(tmp_path / "c.yaml") == cluster
    # YAML reads 1e9 as text
    write_cluster(ROUND, tmp_path / "round.yaml")
    text = (tmp_path / "round.yaml").read_text()
    assert read_cluster(changed(tmp_path, text, "node_link: 1000000000.0", "node_link: 1e9")) == ROUND


def test_file_that_holds_no_cluster_is_rejected(tmp_path: Path) -> None:
    cases = [
        (None, "there is no file .*c.yaml; see configs"),
        ("- 1\n", "c.yaml holds a list; expected fields"),
    ]
    for text, message in [*cases, ("a: [", r"c.yaml is not YAML: .*\Z")]:
        if text:
            (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_cluster(tmp_path / "c.yaml")


def test_links_that_were_not_measured_are_not_used() -> None:
    with pytest.raises(ConfigError, match="2 ranks need gpus_per_node, node_link and network_link"):
        with_(links="none").check_ranks(2)
    with pytest.raises(ConfigError, match="5 ranks need network_link"):
        with_(links="node").check_ranks(5)
    for links, count in (("none", 1), ("node", 4), ("all", 99)):
        with_(links=links).check_ranks(count)


def test_cluster_files_of_the_package_are_valid() -> None:
    files = sorted((CONFIGS / "clusters").glob("*.yaml"))
    assert files and [read_cluster(path).name for path in files] == [path.stem for path in files]


def test_cost_model_imports_neither_torch_nor_yaml() -> None:
    modules = "mllm_seqpar.planner, mllm_seqpar.planner.plan, mllm_seqpar.patches.sizes"
    code = f"import sys, {modules}; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=CONFIGS.parent).strip() == "[]"


PUBLISHED = {"mplug-owl3-7b": 8.07, "idefics-9b": 8.93, "idefics-80b": 80.0}
PUBLISHED |= {"llama-3.2-11b-vision": 10.7, "llama-3.2-90b-vision": 88.6}
"""Billions of parameters, sums over the tensors of the published checkpoints."""
CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
FLAMINGO = {"model_type": "open_flamingo", "vision_config": CLIP | {"patch_size": 14}}
MPT = {"model_type": "mpt", "d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50280}
NEOX = {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10240}
OWL = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}
OWL |= {"num_key_value_heads": 4, "vocab_size": 151851, "hyper_layers": [1, 9, 17, 25], "model_type": "mplugowl3"}
IDEFICS = {"model_type": "idefics", "cross_layer_interval": 4, "use_resampler": True, "qk_layer_norms": True}
HF_CONFIGS = {
    "mplug-owl3-7b": OWL,
    "idefics-9b": IDEFICS | {"vision_config": {"embed_dim": 1280}},
    "llama-3.2-11b-vision": {"model_type": "mllama", "vision_config": {"image_size": 560}},
    "open-flamingo-3b": FLAMINGO | {"text_config": MPT},
    "open-flamingo-4b": FLAMINGO
    | {"cross_attn_every_n_layers": 2, "text_config": NEOX | {"model_type": "gpt_neox", "vocab_size": 50280}},
}


def test_model_files_of_the_package_are_valid() -> None:
    names = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
    models = {name: read_model(find_file("model", name)) for name in names}
    assert [model.name for model in models.values()] == names
    for name, billions in PUBLISHED.items():  # Llama's tower has many position embeddings
        assert models[name].parameters / 1e9 == pytest.approx(billions, rel=0.012)
    with pytest.raises(ConfigError, match="model: 'gpt' is neither a file nor a known name; .*names: .*idefics-80b"):
        find_file("model", "gpt")


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_model_directory_equals_the_model_file(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name).mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIGS[name]))
    assert read_model(folder) == read_model(folder / "config.json") == read_model(find_file("model", name))


def test_default_configurations_of_transformers_are_read(tmp_path: Path) -> None:
    from transformers import IdeficsConfig, MllamaConfig

    for config in (MllamaConfig(), IdeficsConfig()):
        config.save_pretrained(tmp_path / config.model_type)
    mllama, idefics = (read_model(tmp_path / name) for name in ("mllama", "idefics"))
    assert (mllama.text.layers, mllama.cross.layers) == (32, 8)
    assert (idefics.cross.layers, idefics.resampler) == (32, None)


def test_tokens_and_keys_of_mllama_include_padding_tiles(tmp_path: Path) -> None:
    """Counted in a tiny tower of transformers: the tokens that its layers compute, and the keys that it returns."""
    from transformers import MllamaConfig
    from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
    from transformers.models.mllama.modeling_mllama import MllamaVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1}
    picture = {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "intermediate_layers_indices": [0]}
    tower = MllamaVisionModel(MllamaVisionConfig(**sizes, **picture, attention_heads=2))
    tokens: list[int] = []
    tower.transformer.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args or tuple(kwargs.values()))[0].shape[1]), with_kwargs=True
    )
    one_tile = torch.tensor([[[1, 0, 0, 0]]])
    out = tower(torch.zeros(1, 1, 4, 3, 28, 28), aspect_ratio_ids=torch.ones(1, 1).long(), aspect_ratio_mask=one_tile)
    MllamaConfig(vision_config=tower.config).save_pretrained(tmp_path)
    found = read_model(tmp_path).vision
    assert found.keys == out.last_hidden_state.shape[2:4].numel() and [found.tokens] == tokens and found.tiles == 4


def test_empty_tiles_are_sent_but_not_attended_to() -> None:
    model = read_model(find_file("model", "llama-3.2-11b-vision"))
    cluster = read_cluster(find_file("cluster", "a100-80g-8xN"))
    seconds = {}
    for tiles in (None, 4, 1):
        workload = Workload(model=model, frames=600, text=8192, gpus=8, content_tiles=tiles)
        assert workload.cross_problem.keys[0] == 75 * 6404
        seconds[tiles] = attention_candidates(workload, cluster, "cross-attention", ("lv-xattn",))[0].seconds
    assert seconds[None] == seconds[4] and 0.25 < seconds[1] / seconds[4] < 0.5
    with pytest.raises(ConfigError, match="content_tiles is 5; a frame of llama-3.2-11b-vision has 4"):
        Workload(model=model, frames=600, text=8192, gpus=8, content_tiles=5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "there is no .*config.json"),
        ("{", "config.json is not JSON"),
        ('{"model_type": "bert"}', "model_type 'bert'; known model types: idefics, mllama, mplugowl3, open_flamingo"),
        ('{"model_type": "mplugowl3"}', "lacks 'hidden_size', which a mplugowl3 model needs"),
        (json.dumps(OWL | {"num_attention_heads": None}), "has values that a mplugowl3 model cannot have"),
        (json.dumps(OWL | {"num_key_value_heads": 3}), "cannot have: 3 kv_heads do not divide 28 heads"),
    ],
)
def test_invalid_model_directory_is_rejected(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers: 28", "layers: 0", "text: layers is 0; expected a whole number, 1 or more"),
        ("layers: 28, ", "", "text: layers missing"),
        ("hidden:", "hiden:", "text: unknown field hiden; allowed fields"),
        ("kv_heads: 4", "kv_heads: 3", "text: 3 kv_heads do not divide 28 heads"),
        ("projector: [1152, 3584]", "projector: 5", r"projector is 5; expected \[in, out\]"),
        ("cross: {", "crossing: {", "unknown field crossing"),
        ("vision: {", "vision: 5 #", "vision is 5; expected fields"),
        ("own_queries: false", "own_queries: 0", "own_queries is 0; expected true or false"),
        ("features_norm: true", "key_norm: bfloat16", "key_norm is 'bfloat16'; expected one of none, float32, mixed"),
    ],
)
def test_invalid_field_of_a_model_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(changed(tmp_path, (CONFIGS / "models" / "mplug-owl3-7b.yaml").read_text(), old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("matmul: 1000000000000.0\n", "", r"c\.yaml: matmul \(FLOP/s\) missing"),
        ("matmul:", "matmull:", r"unknown field matmull; allowed fields: all_pairs, attention_backward"),
        ("matmul: 1", "matmul: -1", r"matmul is -1000000000000.0; expected FLOP/s, above 0"),
        ("network_latency_s: 0.0", "network_latency_s: -1", r"network_latency_s is -1; expected seconds, 0 or more"),
        ("gpus_per_node: 4", "gpus_per_node: 4.5", r"gpus_per_node is 4.5; expected a whole number of GPUs"),
        ("matmul: 1000000000000.0", "matmul: fast", r"matmul is 'fast'; expected FLOP/s"),
        ("matmul: 1000000000000.0", "matmul: .nan", r"matmul is nan"),
        ("overlap: 1.0", "overlap: 2", r"overlap is 2; expected a fraction from 0 to 1"),
        ("all_pairs: false", "all_pairs: 2", r"all_pairs is 2; expected true or false"),
        ("links: all", "links: some", r"links is 'some'; expected one of all, node, none"),
        ("name: round", "name: [round]", r"name is \['round'\]; expected a string"),
    ],
)
def test_invalid_field_of_a_cluster_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_cluster(ROUND, tmp_path / "round.yaml")
    with pytest.raises(ConfigError, match=message):
        read_cluster(changed(tmp_path, (tmp_path / "round.yaml").read_text(), old, new))
