"""Models small enough to trace in a second, each with what capture and the dry run need."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from odd_models import LENGTH, Adapters, IdleOperators, IdleTower, Stacked, UsedBehind
from shared import made_once
from torch import nn

from osdp.cluster.device import device
from osdp.model.capture import capture
from osdp.model.gpt import GPT, GPTConfig
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource, load_model, output_loss

SEQ_LEN = 16

_SHORT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_HF: dict[str, dict[str, Any]] = {
    "llama": {
        **_SHORT,
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    },
    "bert": {
        **_SHORT,
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 96,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "n_positions": 64,
    },
    "vit": {
        **_SHORT,
        "architectures": ["ViTForImageClassification"],
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
        "attention_probs_dropout_prob": 0.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 96,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}


def gpt(
    *,
    layers: tuple[int, ...] = (3,),
    widths: tuple[int, ...] = (32,),
    vocab: int = 96,
    tied: bool = True,
    seq_len: int = SEQ_LEN,
) -> ModelSource:
    """The project's own GPT; `vocab` and `widths` choose what divides evenly over the ranks."""
    config = GPTConfig(vocab, seq_len, layers, widths, head_width=16, tied=tied)

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.empty(batch, seq_len, dtype=torch.long, device="meta")
        return (tokens, tokens.clone()), {}

    return ModelSource("gpt", partial(GPT, config), inputs, output_loss, seq_len, seq_len, None, "a test's GPT")


def odd(name: str, kind: type[nn.Module]) -> ModelSource:
    """One of the odd models."""

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.empty(batch, LENGTH, dtype=torch.long, device="meta")
        return (tokens, tokens.clone()), {}

    return ModelSource(name, kind, inputs, output_loss, LENGTH, LENGTH, None, f"a test's {name}")


def hugging_face(kind: str, **changes: Any) -> ModelSource:
    """A tiny model of a Hugging Face architecture, read as the user's config.json is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"model_type": kind, **_HF[kind], **changes}))
        return load_model(str(file), seq_len=None if kind == "vit" else SEQ_LEN)


@cache
def source(name: str) -> ModelSource:
    """The models that several tests share, by name."""
    if name in _HF:
        return hugging_face(name)
    if name == "llama-tied":
        return hugging_face("llama", tie_word_embeddings=True)
    ours = {
        "gpt": gpt(),
        "stacked": odd("stacked", Stacked),
        "adapters": odd("adapters", Adapters),
        "idle-operators": odd("idle-operators", IdleOperators),
        "idle-tower": odd("idle-tower", IdleTower),
        "used-behind": odd("used-behind", UsedBehind),
        "gpt-deep": gpt(layers=(8,)),
        "gpt-untied": gpt(tied=False),
        "gpt-uneven": gpt(vocab=97, tied=True),  # neither 97 nor 32 divides by 3
        "gpt-pyramid": gpt(layers=(2, 2), widths=(16, 32), tied=False),
    }
    return ours[name] if name in ours else load_model(name.removesuffix("-preset"))


@made_once
def captured(
    name: str, compute_dtype: str = "bf16", on: str = "CPU", *, held_dtype: str = "fp32", **more: bool
) -> ModelGraph:
    """The model with the kernels of a device; `held_dtype`, `on_host` and `compiled` are those of `capture`."""
    model = source(name)
    return capture(
        model.build_on_meta(),
        model.inputs,
        loss=model.loss,
        name=model.name,
        compute_dtype=compute_dtype,
        held_dtype=held_dtype,
        seq_len=model.seq_len,
        device=device(on),
        **more,
    )
