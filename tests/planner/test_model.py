"""Layer: one process. Model sizes: the files that come along, model directories, and each way to get one wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster
from mllm_seqpar.planner.files import CONFIGS, find_file
from mllm_seqpar.planner.model import ModelSizes, read_model
from mllm_seqpar.planner.step_cost import cross_candidates
from mllm_seqpar.planner.workload import Workload

# Billions of parameters as published: sums over the checkpoints' tensors, on the models' pages.
CLIP = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "patch_size": 14,
}
"""The vision tower of all OpenFlamingo models."""
PUBLISHED = {
    "mplug-owl3-7b": 8.07,
    "idefics-9b": 8.93,
    "idefics-80b": 80.0,
    "llama-3.2-11b-vision": 10.7,
    "llama-3.2-90b-vision": 88.6,
}
NAMES = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_model_files(name: str) -> None:
    model = read_model(find_file("model", name))
    assert model.name == name
    if name in PUBLISHED:
        assert model.parameters / 1e9 == pytest.approx(
            PUBLISHED[name], rel=0.012
        )  # Llama's tower has many position embeddings


def owl(**changes: object) -> dict[str, object]:
    config = {"model_type": "mplugowl3", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    config |= {
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 151851,
        "hyper_layers": [1, 9, 17, 25],
    }
    return config | changes


CONFIGS_OF = {
    "mplug-owl3-7b": owl(),
    "idefics-9b": {
        "model_type": "idefics",
        "cross_layer_interval": 4,
        "use_resampler": True,
        "qk_layer_norms": True,
        "vision_config": {"embed_dim": 1280},
    },
    "llama-3.2-11b-vision": {"model_type": "mllama", "vision_config": {"image_size": 560}},
    "open-flamingo-3b": {
        "model_type": "open_flamingo",
        "text_config": {"model_type": "mpt", "d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50280},
        "vision_config": CLIP,
    },
    "open-flamingo-4b": {
        "model_type": "open_flamingo",
        "cross_attn_every_n_layers": 2,
        "text_config": {
            "model_type": "gpt_neox",
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 50280,
        },
        "vision_config": CLIP,
    },
}


@pytest.mark.parametrize("name", CONFIGS_OF)
def test_a_model_directory_says_the_same_as_the_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS_OF[name]))
    expected: ModelSizes = read_model(find_file("model", name))
    assert read_model(folder) == expected
    assert read_model(folder / "config.json") == expected


def test_real_configurations_are_read(tmp_path: Path) -> None:
    """What transformers' own classes write, defaults and all."""
    from transformers import IdeficsConfig, MllamaConfig

    MllamaConfig().save_pretrained(tmp_path / "m")
    assert read_model(tmp_path / "m").text.layers == 32 and read_model(tmp_path / "m").cross.layers == 8
    IdeficsConfig().save_pretrained(tmp_path / "i")
    assert read_model(tmp_path / "i").cross.layers == 32 and read_model(tmp_path / "i").resampler is None


def test_a_frame_of_llama_is_all_tiles_that_the_tower_computes(tmp_path: Path) -> None:
    """Counted in a tiny tower of the real class: tokens that its layers see, and keys that come out."""
    from transformers import MllamaConfig
    from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
    from transformers.models.mllama.modeling_mllama import MllamaVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1}
    picture = {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "intermediate_layers_indices": [0]}
    tower = MllamaVisionModel(MllamaVisionConfig(**sizes, **picture, attention_heads=2))
    seen: list[int] = []
    tower.transformer.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].shape[1]), with_kwargs=True
    )
    ratio = torch.tensor([[[1, 0, 0, 0]]])  # a picture of one tile, and three empty ones
    out = tower(torch.zeros(1, 1, 4, 3, 28, 28), aspect_ratio_ids=torch.ones(1, 1).long(), aspect_ratio_mask=ratio)
    MllamaConfig(vision_config=tower.config).save_pretrained(tmp_path)
    found = read_model(tmp_path).vision
    assert found.keys == out.last_hidden_state.shape[2:4].numel() and [found.tokens] == seen and found.tiles == 4


def test_empty_tiles_are_projected_and_not_attended_to() -> None:
    model, cluster = (
        read_model(find_file("model", "llama-3.2-11b-vision")),
        read_cluster(find_file("cluster", "a100-80g-8xN")),
    )
    times = {}
    for tiles in (None, 4, 1):
        run = Workload(model=model, frames=600, text=8192, gpus=8, content_tiles=tiles)
        parts = cross_candidates(run, cluster, ("lv-xattn",))["lv-xattn"][0]
        times[tiles] = parts.seconds
        assert run.keys == 75 * 6404
    assert times[None] == times[4] and 0.25 < times[1] / times[4] < 0.5
    with pytest.raises(
        ConfigError, match="content_tiles: 5 is not a number of tiles that a frame of llama-3.2-11b-vis"
    ):
        Workload(model=model, frames=600, text=8192, gpus=8, content_tiles=5)


def test_bad_model_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no .*config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="model_type 'bert'; known are idefics, mllama, mplugowl3, open_flamingo"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mplugowl3"}')
    with pytest.raises(ConfigError, match="lacks 'hidden_size', which a mplugowl3 model needs"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(owl(num_attention_heads=None)))
    with pytest.raises(ConfigError, match="config.json has values that a mplugowl3 model cannot have"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(owl(num_key_value_heads=3)))
    with pytest.raises(ConfigError, match="cannot have: text: 3 kv_heads do not divide 28 heads"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers: 28", "layers: 0", "text: layers is 0; give a whole number, 1 or more"),
        ("layers: 28", "layers: many", "text: layers is 'many'"),
        ("layers: 28, ", "", "text: layers missing"),
        ("hidden:", "hiden:", "text: unknown field hiden; there are"),
        ("kv_heads: 4", "kv_heads: 3", "text: 3 kv_heads do not divide 28 heads"),
        ("projector: [1152, 3584]", "projector: 5", r"projector is 5; give \[in, out\]"),
        ("cross: {", "crossing: {", "unknown field crossing"),
        ("name: mplug-owl3-7b", "text: 5", "text is 5; it must hold fields"),
        ("name: mplug-owl3-7b", "text:", "text is None; it must hold fields"),
        ("own_queries: false", "own_queries: 0", "own_queries is 0; give true or false"),
        ("features_norm: true", "key_norm: bfloat16", "key_norm is 'bfloat16'; give one of none, float32, mixed"),
    ],
)
def test_a_bad_model_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CONFIGS / "models" / "mplug-owl3-7b.yaml").read_text()
    assert old in text
    if new.startswith("text:"):
        text = "\n".join(line for line in text.splitlines() if not line.startswith("text"))
    (tmp_path / "m.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path / "m.yaml")


def test_names_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match="model: 'gpt' is neither a file nor a name that is known here .*idefics-80b"):
        find_file("model", "gpt")
