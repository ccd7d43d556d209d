"""Layer: one process. What the planner refuses: fields of workloads, cluster and model files, and options of `plan`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import ROUND, with_

from mllm_seqpar.__main__ import main
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster, write_cluster
from mllm_seqpar.planner.descriptions import CONFIGS
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.workload import Workload

OWL, QWEN, LLAMA = (
    Workload(model=read_model(name), frames=600, text=8192, gpus=8)
    for name in ("mplug-owl3-7b", "qwen2_5_vl_7b", "llama-3.2-11b-vision")
)


@pytest.mark.parametrize(
    ("workload", "changes", "message"),
    [
        (OWL, {"frames": 0}, "frames is 0; expected a number of frames, 1 or more"),
        (OWL, {"gpus": True}, "gpus is True; expected a whole number"),
        (OWL, {"trained": "half"}, "trained is 'half'; expected one of all, no-vision"),
        (OWL, {"self_attention": "star"}, "self_attention is 'star'; expected one of ring"),
        (OWL, {"element": 0}, "element is 0; expected one of 1, 2, 4, 8"),
        (OWL, {"optimizer": -1}, "optimizer is -1; expected a number of bytes, 0 or more"),
        (OWL, {"mlp_chunk_size": 0}, "mlp_chunk_size is 0; expected a number of tokens, 1 or more"),
        (OWL, {"visual_offload": "disk"}, "visual_offload is 'disk'; expected one of None, cpu"),
        (OWL, {"visual_offload": "cpu", "recompute": False}, "projects K and V again"),
        (OWL, {"lora_r": 0}, "lora_r is 0; expected a rank of adapters, 1 or more"),
        (OWL, {"lora_r": 8, "lora_target": ("q_proj",)}, "lora_target: 'q_proj' is unknown; choose from"),
        (OWL, {"lora_r": 8, "lora_target": ()}, r"lora_target: \[\]; name one or more"),
        (OWL, {"lora_r": 8, "base_parameter": 3}, "base_parameter is 3; expected one of None, 0.5, 1, 2, 4, 8"),
        (OWL, {"base_parameter": 2}, "base_parameter: has no effect without lora_r"),
        (OWL, {"lora_r": 8, "trained": "all"}, "trained: 'all' has no effect with lora_r"),
        (LLAMA, {"content_tiles": 5}, "content_tiles is 5; a frame of llama-3.2-11b-vision has 4"),
        (QWEN, {"visual_offload": "cpu"}, "visual_offload: qwen2_5_vl_7b has no cross-attention"),
        (QWEN, {"recompute": False}, "recompute=False: qwen2_5_vl_7b has no cross-attention"),
        (QWEN, {"answer": 5}, "answer: with trained='no-vision' nothing is generated"),
        (QWEN, {"answer": -1}, "answer is -1; expected a number of tokens, 0 or more"),
        (QWEN, {"shard_weights": True}, "shard_weights: has no effect without answer"),
    ],
)
def test_invalid_workload_is_rejected(workload: Workload, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(workload, **changes)


def test_links_that_were_not_measured_are_not_used() -> None:
    with pytest.raises(ConfigError, match="2 ranks need gpus_per_node, node_link and network_link"):
        with_(links="none").check_ranks(2)
    with pytest.raises(ConfigError, match="5 ranks need network_link"):
        with_(links="node").check_ranks(5)
    for links, count in (("none", 1), ("node", 4), ("all", 99)):
        with_(links=links).check_ranks(count)


OWL_JSON = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}
OWL_JSON |= {"num_key_value_heads": 4, "vocab_size": 151851, "model_type": "mplugowl3"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "there is no .*config.json"),
        ("{", "config.json is not JSON"),
        ('{"model_type": "bert"}', "model_type 'bert'; known model types: idefics, mllama, moss_vl, mplugowl3"),
        ('{"model_type": "mplugowl3"}', "lacks 'hidden_size', which a mplugowl3 model needs"),
        (json.dumps(OWL_JSON | {"num_attention_heads": None}), "has values that a mplugowl3 model cannot have"),
        (json.dumps(OWL_JSON | {"num_key_value_heads": 3}), "cannot have: 3 kv_heads do not divide 28 heads"),
    ],
)
def test_invalid_model_directory_is_rejected(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"c\.yaml' is neither a file nor a known name; known names: a100"),
        ("- 1\n", r"c\.yaml holds a list; expected fields"),
        ("a: [", r"c\.yaml is not YAML: .*\Z"),
    ],
)
def test_file_that_holds_no_fields_is_rejected(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_cluster(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers: 28", "layers: 0", "text: layers is 0; expected a whole number, 1 or more"),
        ("layers: 28, ", "", "text: layers missing"),
        ("hidden:", "hiden:", r"text: unknown field hiden \(did you mean hidden\?\); allowed fields"),
        ("kv_heads: 4", "kv_heads: 3", "text: 3 kv_heads do not divide 28 heads"),
        ("projector: [1152, 3584]", "projector: 5", r"projector is 5; expected \[in, out\]"),
        ("vision: {", "vision: 5 #", "vision is 5; expected fields"),
        ("vision: {", "vision: {full_layers: 99, ", "vision: 99 full_layers are more than 27 layers"),
        ("features_norm: true", "key_norm: bfloat16", "key_norm is 'bfloat16'; expected one of none, float32, mixed"),
        ("matmul: 1000000000000.0\n", "", r"c\.yaml: matmul \(FLOP/s\) missing"),
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
def test_invalid_field_of_a_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The file is that of mPLUG-Owl3-7B, or if it has no such text, a cluster's."""
    file, text = tmp_path / "c.yaml", (CONFIGS / "models" / "mplug-owl3-7b.yaml").read_text()
    read: Any = read_model
    if old not in text:
        write_cluster(ROUND, file)
        read, text = read_cluster, file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read(file)


RUN = {"model": "mplug-owl3-7b", "frames": "4096", "text": "8192", "gpus": "16", "cluster": "a100-80g-4x4"}
Q = "--model qwen2_5_vl_7b "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cluster nowhere", "cluster: 'nowhere' is neither a file nor a known name"),
        ("--frames 0", "--frames: 0 is not allowed; give 1 or more"),
        ("--text 4095", "--text 4095: 4096 frames need the same number of placeholders in the text; give at"),
        ("--trained none --keep-visual", "--keep_visual would have no effect: with --trained none"),
        ("--trained none --gradient-checkpointing", "would have no effect"),
        ("--recompute-attention", "would have no effect: it belongs to --gradient_checkpointing"),
        ("--trained none --optimizer 4", "would have no effect"),
        ("--element 3", "--element: 3 is not allowed; give one of 1, 2, 4, 8"),
        ("--epochs 2", "--epochs 2.0 would have no effect: it belongs to --samples"),
        ("--lora_r 8 --trained all", "trained: 'all' has no effect with lora_r"),
        ("--frame_tokens 9", "a frame of mplug-owl3-7b always has 729 visual tokens"),
        ("--trained none --answer 9", "is planned for decoder-only models"),
        (Q + "--strategy lv-xattn", "--strategy: qwen2_5_vl_7b has no cross-attention, which it is for"),
        (Q + "--keep-visual", "qwen2_5_vl_7b has no cross-attention"),
        (Q + "--frame_tokens 720p", "--frame_tokens 720p: expected a number of tokens, or a size such as 1280x720"),
        (Q + "--frame_tokens 0", "--frame_tokens 0: expected"),
    ],
)
def test_invalid_options_end_in_one_line(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = options.split()
    others = [part for name, value in RUN.items() if f"--{name}" not in given for part in (f"--{name}", value)]
    assert main(["plan", *given, *others]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out
