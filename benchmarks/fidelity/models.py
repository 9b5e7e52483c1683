"""Eleven architectures of different kinds, small enough for processors and large enough that a step is work."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osdp.model.source import ModelSource, load_model

LENGTH, VOCAB = 64, 2048
_TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 128, "num_attention_heads": 4}
_SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_TEXT, **_SHAPE, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    "qwen2": {
        **_TEXT,
        **_SHAPE,
        "architectures": ["Qwen2ForCausalLM"],
        **{"num_key_value_heads": 2, "num_hidden_layers": 6, "tie_word_embeddings": True},
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": VOCAB, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128},
        **{"bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    },
    "opt": {
        **_TEXT,
        "architectures": ["OPTForCausalLM"],
        **{"hidden_size": 320, "num_hidden_layers": 4, "ffn_dim": 1280, "word_embed_proj_dim": 320},
        **{"dropout": 0.0, "attention_dropout": 0.0},
    },
    "bert": {**_TEXT, **_SHAPE, **_STILL, "architectures": ["BertForMaskedLM"]},
    "roberta": {
        **{**_TEXT, **_SHAPE, **_STILL, "architectures": ["RobertaForSequenceClassification"]},
        **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 3, "num_labels": 10},
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        **{"vocab_size": VOCAB, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "n_positions": 128},
    },
    "vit": {
        **{**_SHAPE, **_STILL, "num_attention_heads": 4},
        **{"architectures": ["ViTForImageClassification"], "image_size": 64, "patch_size": 8, "num_labels": 10},
    },
}
GPTS: Mapping[str, Mapping[str, Any]] = {
    "gpt-deep": {"layers": (12,), "widths": (192,)},
    "gpt-wide": {"layers": (2,), "widths": (512,)},
    "gpt-pyramid": {"layers": (2, 2, 1), "widths": (128, 256, 512), "tied": False},
}
NAMES = (*GPTS, *CONFIGS)


class _Remembered(ModelSource):
    capture = functools.cache(ModelSource.capture)  # type: ignore[assignment]


def remembered(source: ModelSource) -> ModelSource:
    """The same, traced once however often it is asked."""
    return _Remembered(**vars(source))


def source_of(name: str) -> ModelSource:
    if name in GPTS:
        return _gpt(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"model_type": name, "attn_implementation": "sdpa", **CONFIGS[name]}))
        return load_model(str(file), seq_len=None if name == "vit" else LENGTH)


def _gpt(name: str) -> ModelSource:
    import torch

    from osdp.model.gpt import GPT, GPTConfig
    from osdp.model.source import output_loss

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.empty((batch, LENGTH), dtype=torch.long, device="meta")
        return (tokens, tokens.clone()), {}

    return ModelSource(
        name=name,
        build=lambda: GPT(GPTConfig(VOCAB, LENGTH, **GPTS[name])),
        inputs=inputs,
        loss=output_loss,
        seq_len=LENGTH,
        sample_tokens=LENGTH,
        published_parameters=None,
        description=name,
    )
