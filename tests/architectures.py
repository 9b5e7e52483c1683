"""Tiny Hugging Face models of many architectures, read as a user's config.json is, with data to train them on."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from shared import made_once
from small_models import gpt
from torch import Tensor

from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource, load_model

LENGTH, VOCAB = 8, 90
_TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_TEXT, "intermediate_size": 48, "max_position_embeddings": 16}
_ENCODER = {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 10, "attention_probs_dropout_prob": 0.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    "qwen2": {**_WIDE, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mixtral": {
        **_WIDE,
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        **{"bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    },
    "gpt_neox": {
        **_WIDE,
        "architectures": ["GPTNeoXForCausalLM"],
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False},
    },
    "opt": {
        **{key: value for key, value in _WIDE.items() if key != "intermediate_size"},
        "architectures": ["OPTForCausalLM"],
        **{"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    },
    "bert": {**_ENCODER, "architectures": ["BertForMaskedLM"]},
    "roberta": {**_ENCODER, "architectures": ["RobertaForSequenceClassification"], "num_labels": 10},
    "distilbert": {
        "architectures": ["DistilBertForMaskedLM"],
        **{"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        **{"max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0},
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "n_positions": 16},
    },
    "bart": {
        "architectures": ["BartForConditionalGeneration"],
        **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    },
    "vit": {
        **{**_IMAGES, **{k: v for k, v in _WIDE.items() if k not in ("vocab_size", "max_position_embeddings")}},
        "architectures": ["ViTForImageClassification"],
        "hidden_dropout_prob": 0.0,
    },
    "swin": {
        **_IMAGES,
        "architectures": ["SwinForImageClassification"],
        **{"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        **{"drop_path_rate": 0.0, "hidden_dropout_prob": 0.0},
    },
}


@cache
def tiny(name: str) -> ModelSource:
    """A tiny model: of an architecture above, or our own GPT, tied or with widths that change."""
    if name == "gpt":
        return gpt(layers=(2,), vocab=VOCAB + 1, seq_len=LENGTH)  # 91 divides over none of the worlds
    if name == "gpt-pyramid":
        return gpt(layers=(1, 2), widths=(16, 32), vocab=VOCAB + 1, tied=False, seq_len=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"model_type": name, "attn_implementation": "sdpa", **CONFIGS[name]}))
        return load_model(str(file), seq_len=None if name in ("vit", "swin") else LENGTH)


@made_once
def graph_of(name: str) -> ModelGraph:
    """The captured model. Units do not depend on the dtype, and on fake tensors Mixtral's experts run in bf16 only."""
    source = tiny(name)
    return capture(source.build_on_meta(), source.inputs, loss=source.loss, name=name, compute_dtype="bf16")


def batch_of(name: str, size: int, *, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Random data in the shape of a model's inputs; no token is padding, which would shift positions."""
    args, kwargs = tiny(name).inputs(size)
    generator = torch.Generator().manual_seed(seed)

    def filled(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        return torch.randint(3, 10 if tensor.ndim == 1 else VOCAB, tensor.shape, generator=generator)

    return tuple(map(filled, args)), {key: filled(value) for key, value in kwargs.items()}
