"""Cases of Hugging Face configurations: `osdp plan config.json`."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

from benchmarks.fuzz.case import HOSTILE, Case, at, dumped, flipped, odd_file, places, put

PLAN = ("--cluster", "4xA100-80GB", "--batch", "1", "--modes", "free", "--no-split", "--no-recompute", "--quiet")
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BASES: tuple[dict[str, Any], ...] = (
    {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SMALL, "num_key_value_heads": 2},
        **{
            "vocab_size": 32,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2},
        **{"n_positions": 16, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0},
    },
    {
        **{"model_type": "bert", "architectures": ["BertForMaskedLM"], **_SMALL},
        **{"vocab_size": 32, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0},
    },
    {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"], **_SMALL},
        **{"image_size": 8, "patch_size": 4, "num_channels": 3},
    },
)
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_embd",
    "n_layer",
    "n_head",
    "vocab_size",
    "patch_size",
)


def config_case(folder: Path, chance: random.Random) -> Case:
    path = folder / "config.json"
    base = chance.choice(BASES)
    good = json.dumps(base, indent=2).encode()
    choice = chance.random()
    if choice > 0.97:
        path.write_bytes(good)
        return Case(f"plan {base['model_type']}: unchanged", ("plan", str(path), *PLAN), good=True)
    if choice < 0.15:
        what, nonsense = odd_file(path, good, chance), True
    elif choice < 0.3:
        path.write_bytes(flipped(good, chance))
        what, nonsense = "bytes", False
    else:
        config = copy.deepcopy(base)
        what, nonsense = chance.choice(CHANGES)(config, chance)
        path.write_bytes(dumped(config))
    return Case(f"plan {base['model_type']}: {what}", ("plan", str(path), *PLAN), nonsense)


def _another_value(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    place = chance.choice(list(places(config)))
    put(config, place, chance.choice(HOSTILE))
    return f"{place} = {str(at(config, place))[:20]!r}", False


def _bad_size(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    key = chance.choice([key for key in SIZES if key in config])
    config[key] = chance.choice((-1, -(10**9), math.nan, math.inf, 10**13, 2**64, 10**30, "many", [2], {"a": 1}))
    return f"{key} = {config[key]}", True


def _too_many_layers(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    key = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    config[key] = chance.choice((10_001, 10**6, 10**9, 10**12))
    return f"{key} = {config[key]}", True


def _architectures(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    odd = (
        [1],
        [None, 1],
        [["LlamaForCausalLM"]],
        [{}],
        "LlamaForCausalLM",
        {"a": 1},
        ["NoSuchModel"],
        ["os"],
        [True],
        5,
    )
    config["architectures"] = chance.choice(odd)
    return f"architectures = {config['architectures']}", config["architectures"] != [None, 1]


def _model_type(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    config["model_type"] = chance.choice((None, 1, [], {}, "", "no-such-model", "llama\0", True, ["llama"]))
    return f"model_type = {config['model_type']!r}", True


def _unknown(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    key = chance.choice(
        ("colour", "self", "cls", "model_type_", "torch_dtype", "dtype", "use_cache", "auto_map", "id2label")
    )
    config[key] = chance.choice(HOSTILE)
    return f"{key} = {str(config[key])[:20]!r}", False


def _missing(config: dict[str, Any], chance: random.Random) -> tuple[str, bool]:
    del config["model_type"]
    return "no model_type", True


CHANGES = (_another_value, _bad_size, _too_many_layers, _architectures, _model_type, _unknown, _missing)
