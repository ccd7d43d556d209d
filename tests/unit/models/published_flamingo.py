"""Tiny OpenFlamingo parts in the published form: a language model, a CLIP, and a checkpoint.pt.

Names, files and configurations are copied from the published directories. This module imports nothing from the package
under test. Weights are random, and no gate is closed.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

sys.modules.setdefault("open_clip", types.ModuleType("open_clip"))  # open_flamingo imports it, and nothing here uses it

WIDTH, HEADS, INNER, LAYERS, VISION = 32, 4, 48, 4, 24
EVERY = {"mosaic_gpt": 1, "gpt_neox": 2, "mpt": 4, "llama": 4}
PADDED = 11  # rows that a language model has beyond its tokenizer, as 50432 are beyond 50277; LLaMA has none

Shapes = dict[str, tuple[int, ...]]


def published_parts(root: Path, kind: str) -> dict[str, Path]:
    """Write `lm`, `clip` and `checkpoint.pt` below `root`, and return them as the arguments of a conversion."""
    generator = torch.Generator().manual_seed(0)
    rows = _write_tokenizer(root / "lm", kind).get_vocab_size()
    _write_language_model(root / "lm", kind, rows if kind == "llama" else rows + PADDED, generator)
    _write_clip(root / "clip", generator)
    _write_checkpoint(root / "checkpoint.pt", kind, rows + 3, generator)
    return {"language_model": root / "lm", "vision_model": root / "clip", "checkpoint": root / "checkpoint.pt"}


def _write_tokenizer(folder: Path, kind: str) -> Tokenizer:
    """Of bytes for GPT-NeoX, of characters for LLaMA; neither states a pad token."""
    folder.mkdir(parents=True)
    if kind == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
        made = Tokenizer(models.BPE({x: i for i, x in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.add_special_tokens(tokens[:3])
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        named: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
        named |= {"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "LlamaTokenizer"}
    else:
        tokens = ["<|endoftext|>", "<|padding|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(models.BPE({x: i for i, x in enumerate(tokens)}, []))
        made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.add_special_tokens(tokens[:2])
        named = {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "unk")}
        named |= {"add_prefix_space": False, "model_max_length": 2048, "tokenizer_class": "GPTNeoXTokenizer"}
    made.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", named)
    marks = {name: named[name] for name in ("bos_token", "eos_token", "unk_token")}
    _write_json(folder / "special_tokens_map.json", marks)
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "mosaic_gpt": {
        "alibi": True, "alibi_bias_max": 8, "architectures": ["MosaicGPT"], "attn_clip_qkv": None, "attn_impl": "torch",
        "attn_pdrop": 0, "attn_qk_ln": True, "attn_uses_sequence_id": False,
        "auto_map": {"AutoConfig": "configuration_mosaic_gpt.MosaicGPTConfig",
                     "AutoModelForCausalLM": "mosaic_gpt.MosaicGPT"},
        "d_model": WIDTH, "emb_init_std": None, "emb_pdrop": 0, "embedding_fraction": 1.0, "init_device": "cpu",
        "logit_scale": None, "low_precision_layernorm": True, "max_seq_len": 2048, "mlp_ratio": 4,
        "model_type": "mosaic_gpt", "n_heads": HEADS, "n_layers": LAYERS, "no_bias": True, "prefix_lm": False,
        "resid_pdrop": 0, "softmax_scale": None, "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "float32",
        "transformers_version": "4.27.4", "use_cache": False, "verbose": 0,
    },
    "mpt": {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
                        "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
                        "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
        "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig",
                     "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
        "d_model": WIDTH, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
        "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None,
        "max_seq_len": 2048, "model_type": "mpt", "n_heads": HEADS, "n_layers": LAYERS, "no_bias": True,
        "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16", "transformers_version": "4.28.1", "use_cache": False, "verbose": 0,
    },
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": WIDTH, "initializer_range": 0.02, "intermediate_size": INNER, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS, "rotary_emb_base": 10000, "rotary_pct": 1.0, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True, "use_parallel_residual": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": WIDTH, "initializer_range": 0.02, "intermediate_size": INNER, "max_position_embeddings": 2048,
        "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.28.0", "use_cache": True,
    },
}  # fmt: skip


def _layer_shapes(kind: str) -> Shapes:
    """Return the shapes of one decoder layer, by the names below its prefix."""
    square, wide, back = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    wqkv = {"attn.Wqkv": (3 * WIDTH, WIDTH), "attn.out_proj": square}
    linears: dict[str, Shapes] = {
        "mosaic_gpt": wqkv | {"mlp.mlp_up": (4 * WIDTH, WIDTH), "mlp.mlp_down": (WIDTH, 4 * WIDTH)},
        "mpt": wqkv | {"ffn.up_proj": (4 * WIDTH, WIDTH), "ffn.down_proj": (WIDTH, 4 * WIDTH)},
        "gpt_neox": {"attention.query_key_value": (3 * WIDTH, WIDTH), "attention.dense": square}
        | {"mlp.dense_h_to_4h": wide, "mlp.dense_4h_to_h": back},
        "llama": {f"self_attn.{name}_proj": square for name in "qkvo"}
        | {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": back},
    }
    norms = {"mosaic_gpt": ("ln_1", "ln_2", "attn.q_ln", "attn.k_ln"), "mpt": ("norm_1", "norm_2")}
    modules = linears[kind] | dict.fromkeys(norms.get(kind, ("input_layernorm", "post_attention_layernorm")), (WIDTH,))
    shapes = {f"{name}.weight": shape for name, shape in modules.items()}
    return shapes | ({f"{name}.bias": shape[:1] for name, shape in modules.items()} if kind == "gpt_neox" else {})


MPT_BLOCKS, NEOX_NORM = "transformer.blocks", "gpt_neox.final_layer_norm"
BLOCKS = {"mosaic_gpt": MPT_BLOCKS, "mpt": MPT_BLOCKS, "gpt_neox": "gpt_neox.layers", "llama": "model.layers"}
EMBEDDING = {"mosaic_gpt": "transformer.wte.weight", "mpt": "transformer.wte.weight"}
EMBEDDING |= {"gpt_neox": "gpt_neox.embed_in.weight", "llama": "model.embed_tokens.weight"}
LAST = {"mosaic_gpt": ["transformer.ln_f.weight"], "mpt": ["transformer.norm_f.weight"], "llama": ["model.norm.weight"]}
LAST["gpt_neox"] = [f"{NEOX_NORM}.weight", f"{NEOX_NORM}.bias"]
HEAD = {"gpt_neox": "embed_out.weight", "llama": "lm_head.weight"}


def _buffers(kind: str) -> dict[str, Tensor]:
    """Return what versions of transformers of 2023 kept in the state of each layer."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS))
    masks = {"bias": torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(), "masked_bias": torch.tensor(-1e9)}
    kept = {
        "llama": {"self_attn.rotary_emb.inv_freq": frequencies},
        "gpt_neox": {"attention.rotary_emb.inv_freq": frequencies}
        | {f"attention.{name}": mask for name, mask in masks.items()},
    }.get(kind, {})
    return {f"{BLOCKS[kind]}.{layer}.{name}": x.clone() for layer in range(LAYERS) for name, x in kept.items()}


def _write_language_model(folder: Path, kind: str, rows: int, generator: torch.Generator) -> None:
    _write_json(folder / "config.json", CONFIGS[kind] | {"vocab_size": rows})
    shapes = {EMBEDDING[kind]: (rows, WIDTH)} | dict.fromkeys(LAST[kind], (WIDTH,))
    shapes |= {HEAD[kind]: (rows, WIDTH)} if kind in HEAD else {}
    for layer in range(LAYERS):
        shapes |= {f"{BLOCKS[kind]}.{layer}.{name}": shape for name, shape in _layer_shapes(kind).items()}
    dtype = getattr(torch, CONFIGS[kind]["torch_dtype"])
    state = {name: x.to(dtype) for name, x in _random(shapes, generator).items()} | _buffers(kind)
    if kind in ("mosaic_gpt", "gpt_neox"):
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = sorted(state)
    stem, end = ("model", "safetensors") if kind == "llama" else ("pytorch_model", "bin")
    weight_map = {}
    for number, own in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{stem}-{number:05d}-of-00002.{end}"
        part = {name: state[name] for name in own}
        if end == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    _write_json(folder / f"{stem}.{end}.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})


def _write_clip(folder: Path, generator: torch.Generator) -> None:
    """Write a whole CLIPModel: the text model too, with integers as sizes of images."""
    folder.mkdir()
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-05, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision = common | {"hidden_size": VISION, "intermediate_size": 40, "image_size": 16, "patch_size": 8}
    text = common | {"hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 7, "vocab_size": 50}
    text |= {"model_type": "clip_text_model", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    sides = {"text_config": text, "vision_config": vision | {"model_type": "clip_vision_model"}}
    config = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 12, **sides}
    _write_json(folder / "config.json", config | {"logit_scale_init_value": 2.6592, "torch_dtype": "float32"})
    pictures = {"crop_size": 16, "size": 16, "resample": 3, "feature_extractor_type": "CLIPFeatureExtractor"}
    pictures |= {"do_center_crop": True, "do_normalize": True, "do_resize": True}
    pictures |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    _write_json(folder / "preprocessor_config.json", pictures)
    state = _random(_shapes_of(CLIPModel(CLIPConfig.from_pretrained(folder))), generator)
    for side, length in (("text", 7), ("vision", 5)):
        state[f"{side}_model.embeddings.position_ids"] = torch.arange(length)[None]
    torch.save(state, folder / "pytorch_model.bin")


def _shapes_of(module: nn.Module, prefix: str = "") -> Shapes:
    return {prefix + name: tuple(x.shape) for name, x in module.state_dict().items()}


def _trained_shapes(kind: str, rows: int) -> Shapes:
    """What the authors' filter keeps: perceiver, gated cross-attention, embeddings and names with "embed" in them."""
    from open_flamingo.src.helpers import GatedCrossAttentionBlock, PerceiverResampler

    shapes = _shapes_of(PerceiverResampler(dim=VISION), "perceiver.")
    for layer in range(EVERY[kind] - 1, LAYERS, EVERY[kind]):
        # the one form of the name in one checkpoint, the other in another
        gated = f"{BLOCKS[kind]}.{layer}.gated_cross_attn_layer"
        below = f"lang_encoder.{f'gated_cross_attn_layers.{layer}' if kind == 'llama' else gated}."
        shapes |= _shapes_of(GatedCrossAttentionBlock(dim=WIDTH, dim_visual=VISION), below)
    names = [EMBEDDING[kind], *([HEAD[kind]] if kind == "gpt_neox" else [])]
    return shapes | {f"lang_encoder.{name}": (rows, WIDTH) for name in names}


def _write_checkpoint(file: Path, kind: str, rows: int, generator: torch.Generator) -> None:
    state = _random(_trained_shapes(kind, rows), generator)
    for name, x in _buffers(kind).items():
        *below, rest = name.split(".", 3)
        state[".".join(["lang_encoder", *below, "decoder_layer", rest])] = x
    if kind in ("llama", "mpt"):
        torch.save({"epoch": 3, "model_state_dict": {f"module.{name}": x for name, x in state.items()}}, file)
    else:
        torch.save(state, file)


def _random(shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("_gate"):
            made[name] = 0.8 + 0.1 * noise
        elif len(shape) == 1 and name.endswith("weight"):
            made[name] = 1 + 0.2 * noise
        elif len(shape) < 2:
            made[name] = 0.2 * noise
        else:
            made[name] = noise * noise[0].numel() ** -0.5
    return made


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))
