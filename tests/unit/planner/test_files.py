"""Layer: one process. Files of clusters and models, and model directories."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import ROUND, with_

from mllm_seqpar.cli.check_data import _keys_per_frame
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster, write_cluster
from mllm_seqpar.planner.descriptions import CONFIGS, find_file
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import attention_selection
from mllm_seqpar.planner.workload import Workload


def changed(folder: Path, text: str, old: str, new: str) -> Path:
    """Return a file with `text`, in which `old` is replaced by `new`."""
    assert old in text
    (folder / "c.yaml").write_text(text.replace(old, new))
    return folder / "c.yaml"


def test_write_and_read_give_an_equal_cluster(tmp_path: Path) -> None:
    rates = (("cuda_cudnn", 128, False, 6e14, 5.5e14), ("triton_intervals", 128, True, 4e14, 3e14))
    some = with_(network_link_per_gpu=1e7, peak_flops=1e15, overlap=0.5, source="measured: here")
    for cluster in (ROUND, some, with_(kernels=rates)):
        write_cluster(cluster, tmp_path / "c.yaml")
        assert read_cluster(tmp_path / "c.yaml") == cluster
    # YAML reads 1e9 as text
    write_cluster(ROUND, tmp_path / "round.yaml")
    text = (tmp_path / "round.yaml").read_text()
    assert read_cluster(changed(tmp_path, text, "node_link: 1000000000.0", "node_link: 1e9")) == ROUND
    (tmp_path / "rates.yaml").write_text(text + "kernels:\n- [cuda_cudnn, 128, false, 6e14, 550e12]\n")
    assert read_cluster(tmp_path / "rates.yaml") == with_(kernels=rates[:1])


@pytest.mark.parametrize(
    "row",
    ["cuda_cudnn", ["cuda_cudnn", 128, 6e14, 5e14], ["cuda_cudnn", 128, False, 6e14, -1.0], [1, 128, False, 1, 1]],
)
def test_invalid_rates_of_kernels_are_refused(row: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"kernels: .*; expected \[kernel, head dim, true under a mask or false, FLOP"
    ):
        with_(kernels=(row,))


def test_cluster_files_of_the_package_are_valid() -> None:
    files = sorted((CONFIGS / "clusters").glob("*.yaml"))
    assert files and [read_cluster(path).name for path in files] == [path.stem for path in files]


def test_cost_model_imports_neither_torch_nor_yaml() -> None:
    modules = "mllm_seqpar.planner, mllm_seqpar.planner.plan, mllm_seqpar.patches.sizes"
    code = f"import sys, {modules}; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=CONFIGS.parent).strip() == "[]"


PUBLISHED = {"mplug-owl3-7b": 8.07, "idefics-9b": 8.93, "idefics-80b": 80.0}
PUBLISHED |= {"llama-3.2-11b-vision": 10.7, "llama-3.2-90b-vision": 88.6, "moss_vl_11b": 11.336}
"""Billions of parameters, sums over the tensors of the published checkpoints."""
QWENS = {
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_72b": 73_410_777_344,
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
}
"""Parameters of the published checkpoints."""
CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
FLAMINGO = {"model_type": "open_flamingo", "vision_config": CLIP | {"patch_size": 14}}
MPT = {"model_type": "mpt", "d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50280}
NEOX = {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10240}
OWL = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}
OWL |= {"num_key_value_heads": 4, "vocab_size": 151851, "hyper_layers": [1, 9, 17, 25], "model_type": "mplugowl3"}
IDEFICS = {"model_type": "idefics", "cross_layer_interval": 4, "use_resampler": True, "qk_layer_norms": True}
MOSS_TEXT = {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 12288}
MOSS_TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
MOSS_TEXT |= {"cross_attention_layers": list(range(2, 48, 4))}
MOSS_TOWER = {"hidden_size": 1152, "depth": 27, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096}
MOSS_TOWER |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
MOSS_TOWER |= {"patch_size": 16, "spatial_merge_size": 2}
MOSS = {"model_type": "moss_vl", "text_config": MOSS_TEXT, "vision_config": MOSS_TOWER}
PREVIEW = {"model_type": "mllama", "architectures": ["VideoMllamaForConditionalGeneration"]}
PREVIEW |= {"vision_config": {"image_size": 560}}
HF_CONFIGS = {
    "moss_vl_11b": MOSS,
    "mplug-owl3-7b": OWL,
    "idefics-9b": IDEFICS | {"vision_config": {"embed_dim": 1280}},
    "llama-3.2-11b-vision": {"model_type": "mllama", "vision_config": {"image_size": 560}},
    "moss-video-preview-11b": PREVIEW,
    "open-flamingo-3b": FLAMINGO | {"text_config": MPT},
    "open-flamingo-4b": FLAMINGO
    | {"cross_attn_every_n_layers": 2, "text_config": NEOX | {"model_type": "gpt_neox", "vocab_size": 50280}},
}


def qwen_config(name: str) -> dict[str, Any]:
    """Return the configuration that a model file describes, with the names of the published `config.json`."""
    sizes = read_model(name)
    text, vision, deepstack = sizes.text, sizes.vision, sizes.vision.deepstack
    language = {"hidden_size": text.hidden, "num_hidden_layers": text.layers, "num_attention_heads": text.heads}
    language |= {"num_key_value_heads": text.kv_heads, "intermediate_size": text.mlp_inner}
    language |= {"vocab_size": text.vocabulary, "tie_word_embeddings": text.tied_embeddings}
    tower = {"depth": vision.layers, "hidden_size": vision.width, "num_heads": vision.heads, "patch_size": vision.patch}
    tower |= {"intermediate_size": vision.mlp_inner, "out_hidden_size": text.hidden}
    if not deepstack:
        tower |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
        return {"model_type": "qwen2_5_vl", **language, "vision_config": tower}
    tower |= {"deepstack_visual_indexes": list(range(deepstack)), "num_position_embeddings": 2304}
    return {"model_type": "qwen3_vl", "text_config": language | {"head_dim": text.head_dim}, "vision_config": tower}


for _name in ("qwen2_5_vl_7b", "qwen3_vl_8b"):
    HF_CONFIGS[_name] = qwen_config(_name)


def test_model_files_of_the_package_are_valid() -> None:
    names = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
    models = {name: read_model(name) for name in names}
    assert [model.name for model in models.values()] == names
    for name, billions in PUBLISHED.items():  # Llama's tower has many position embeddings
        assert models[name].parameters / 1e9 == pytest.approx(billions, rel=0.012)
    with pytest.raises(ConfigError, match="model: 'gpt' is neither a file nor a known name; .*names: .*idefics-80b"):
        find_file("model", "gpt")


@pytest.mark.parametrize(
    ("name", "nested"), [*((name, None) for name in HF_CONFIGS), ("qwen2_5_vl_7b", True), ("qwen3_vl_8b", False)]
)
def test_model_directory_equals_the_model_file(name: str, nested: bool | None, tmp_path: Path) -> None:
    """transformers has moved the fields of Qwen's language models into `text_config`."""
    (folder := tmp_path / name).mkdir()
    config = dict(HF_CONFIGS[name])
    if nested:
        config["text_config"] = {
            key: value for key, value in config.items() if key not in ("model_type", "vision_config")
        }
    elif nested is False:
        config |= config.pop("text_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(folder) == read_model(folder / "config.json") == read_model(name)
    if name in QWENS or name == "moss_vl_11b":
        assert _keys_per_frame(str(folder)) is None  # the number of visual tokens depends on the size of the images


def class_of(name: str) -> Any:
    """Return the model of transformers, or ours, on the meta device."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from mllm_seqpar.models.moss_vl import MossVLConfig, MossVLForConditionalGeneration
    from mllm_seqpar.models.video_mllama import VideoMllamaConfig, VideoMllamaForConditionalGeneration

    with torch.device("meta"):
        if name == "moss_vl_11b":
            return MossVLForConditionalGeneration(MossVLConfig(**MOSS))
        if name == "moss-video-preview-11b":
            config = VideoMllamaConfig(vision_config=PREVIEW["vision_config"])
            return VideoMllamaForConditionalGeneration(config)
        fields = qwen_config(name)
        text = {key: value for key, value in fields.items() if key not in ("model_type", "vision_config")}
        text = text.get("text_config", text)
        options = {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
        config = AutoConfig.for_model(fields["model_type"], **options, vision_config=fields["vision_config"])
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("name", [*QWENS, "moss_vl_11b", "moss-video-preview-11b"])
def test_parameters_are_those_of_the_real_classes(name: str) -> None:
    """The sizes leave out norms and biases, and the many position embeddings of Llama's tower."""
    model, sizes = class_of(name), read_model(name)
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == QWENS.get(name, count)
    assert sizes.parameters == pytest.approx(count, rel=0.012 if name == "moss-video-preview-11b" else 0.0025)
    if name == "moss_vl_11b":
        larger = sizes.with_frame_tokens(sizes.tokens_of_image(720, 1280))
        assert (larger.vision.tokens, larger.vision.keys) == (44 * 80, 22 * 40 + 1)
    if name == "moss-video-preview-11b":
        assert sizes.vision.keys == model.config.tokens_per_frame == 101
        assert sizes.vision.tokens == model.config.patches_per_side**2 + 8


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
    model = read_model("llama-3.2-11b-vision")
    cluster = read_cluster("a100-80g-8xN")
    seconds = {}
    for tiles in (None, 4, 1):
        workload = Workload(model=model, frames=600, text=8192, gpus=8, content_tiles=tiles)
        assert workload.problem("cross-attention").keys[0] == 75 * 6404
        seconds[tiles] = attention_selection(workload, cluster, "cross-attention", ("lv-xattn",)).seconds
    assert seconds[None] == seconds[4] and 0.25 < seconds[1] / seconds[4] < 0.5
