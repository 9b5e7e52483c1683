"""Every architecture of the installed transformers by kind, each with a configuration that is small to train."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

KINDS = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image": ("IMAGE_CLASSIFICATION",),
    "audio": ("AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ"),
    "image-text": ("IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
}
MOST_PARAMETERS = 80_000_000  # of a configuration that is trained here
VOCAB = 160

# Fields of configurations by what they mean, with the size that a small model gets.
_SIZES = {
    64: (
        *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size"),
        *("vision_embed_dim", "embedding_size", "emb_dim", "projection_dim", "mm_hidden_size", "lru_width"),
        *("projection_size", "text_embed_dim", "d_embed", "word_embed_proj_dim", "out_hidden_size"),
    ),
    96: (
        *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"),
        *("hidden_dim", "d_inner", "moe_intermediate_size", "shared_expert_intermediate_size", "feed_forward_size"),
        *("shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"),
    ),
    4: (
        *("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        *("n_heads", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ),
    2: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"),
        *("num_decoder_layers", "num_encoder_layers", "depth", "num_key_value_heads", "multi_query_group_num"),
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_hidden_groups"),
    ),
    16: (
        "qk_rope_head_dim",
        "head_dim",
        "d_kv",
        "v_head_dim",
        "qk_nope_head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "attention_head_dim",
    ),
    1: ("n_group", "topk_group", "first_k_dense_replace"),
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
_SHORTER = {name: size for name, size in _SMALL.items() if size == 2 and "layer" in name}


@dataclass(frozen=True)
class Architecture:
    kind: str
    model_type: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.class_name}/{self.model_type}"


def architectures(kinds: list[str]) -> list[Architecture]:
    found: dict[str, Architecture] = {}
    for kind in kinds:
        for mapping in KINDS[kind]:
            names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
            for model_type, classes in names.items():
                for class_name in classes if isinstance(classes, (tuple, list)) else (classes,):
                    found.setdefault(class_name, Architecture(kind, model_type, class_name))
    return list(found.values())


def candidates(architecture: Architecture) -> Iterator[nn.Module]:
    """Models of the architecture, the smallest first: the first one that trains is surveyed."""
    kind: Any = getattr(transformers, architecture.class_name)
    config_class = kind.config_class or transformers.CONFIG_MAPPING[architecture.model_type]
    for sizes, vocab in ((_SMALL, VOCAB), (_SHORTER, VOCAB), (_SHORTER, 0)):
        try:
            config = config_class(**_overrides(config_class(), sizes, vocab))
            with torch.device("meta"):
                numel = sum(
                    p.numel() for p in kind(config_class(**_overrides(config_class(), sizes, vocab))).parameters()
                )
        except Exception:
            continue
        if numel <= MOST_PARAMETERS:
            torch.manual_seed(0)
            yield kind(config).train()


def _overrides(config: Any, sizes: dict[str, int], vocab: int) -> dict[str, Any]:
    """What is changed in a configuration and in the ones inside it."""
    changes: dict[str, Any] = {}
    layers = None
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            changes[key] = {**_overrides(value, sizes, vocab), "model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool) and key in sizes:
            changes[key] = min(value, sizes[key]) if value > 0 else value
            layers = changes[key] if key in ("num_hidden_layers", "num_layers") else layers
        elif vocab and key == "vocab_size" and isinstance(value, int):
            changes[key] = vocab
        elif vocab and key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= vocab:
            changes[key] = vocab - 1 - sum(map(ord, key)) % 24
    if layers is not None:
        for key, value in list(vars(config).items()):
            if key == "layer_types" and isinstance(value, list):
                changes[key] = _spread(value, layers)
    return changes


def _spread(types: list[Any], layers: int) -> list[Any]:
    """So many entries of a list, with as many different ones as there is room for."""
    distinct = list(dict.fromkeys(types))
    return (distinct * layers)[:layers]


def takes(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
