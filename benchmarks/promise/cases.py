"""Random cases: a model, ranks, precision, optimizer, batch, accumulation, how tight the limit is. No torch in here."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

PRECISIONS = ("fp32", "bf16", "pure-bf16")
OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")
WORLDS = ("1x2", "1x3", "1x4", "2x2")
KINDS = ("gpt", "llama", "qwen2", "gpt2", "opt", "bert", "t5", "vit")
TRAINED_BY_COMMAND = ("gpt", "llama", "qwen2", "gpt2", "opt")  # the others take no tokens alone


@dataclass(frozen=True)
class Case:
    """`tightness` is 0 at the smallest peak that any plan reaches, and 1 where the limit changes nothing."""

    number: int
    kind: str
    config: dict[str, Any]
    seq_len: int
    world: str
    precision: str
    optimizer: str
    batch: int
    accumulation: int
    tightness: float

    @property
    def ranks(self) -> int:
        nodes, devices = self.world.split("x")
        return int(nodes) * int(devices)

    @property
    def by_command(self) -> bool:
        return self.kind in TRAINED_BY_COMMAND

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def case_of(seed: int, number: int) -> Case:
    """The case of that number: the same for the same seed, however many there are."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(KINDS)
    heads = draw.choice((2, 4))
    width = heads * draw.choice((8, 12, 16))
    return Case(
        number=number,
        kind=kind,
        config=_config(kind, draw, width, heads),
        seq_len=draw.choice((8, 12, 16, 24)),
        world=draw.choice(WORLDS),
        precision=draw.choice(PRECISIONS),
        optimizer=draw.choice(OPTIMIZERS),
        batch=draw.choice((1, 2, 3, 4)),
        accumulation=draw.choice((1, 1, 2, 4, 8)),
        tightness=draw.choice((0.0, 0.02, 0.05, draw.random(), draw.random())),
    )


def _config(kind: str, draw: random.Random, width: int, heads: int) -> dict[str, Any]:
    """A configuration as Hugging Face writes it; of the project's own GPT its arguments."""
    layers, vocab, inner = draw.choice((2, 3, 4)), draw.choice((61, 96, 128, 301)), width * draw.choice((2, 3, 4))
    common = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    tied = draw.random() < 0.5
    if kind == "gpt":
        return {"vocab": vocab, "layers": layers, "width": width, "tied": tied}
    if kind in ("llama", "qwen2"):
        more = {"intermediate_size": inner, "num_key_value_heads": heads // 2, "tie_word_embeddings": tied}
        name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
        return {**common, **more, "architectures": [name], "max_position_embeddings": 64}
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "n_positions": 32}
        none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return {**sizes, **none, "architectures": ["GPT2LMHeadModel"], "bos_token_id": 1, "eos_token_id": 2}
    if kind == "opt":
        more = {"ffn_dim": inner, "dropout": 0.0, "max_position_embeddings": 64, "word_embed_proj_dim": width}
        return {**common, **more, "architectures": ["OPTForCausalLM"], "pad_token_id": 1}
    if kind == "bert":
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        more = {"intermediate_size": inner, "max_position_embeddings": 32}
        return {**common, **more, **none, "architectures": ["BertForMaskedLM"]}
    if kind == "t5":
        sizes = {"d_model": width, "d_kv": width // heads, "d_ff": inner, "num_layers": 2, "num_heads": heads}
        more = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "n_positions": 64}
        return {**sizes, **more, "vocab_size": vocab, "architectures": ["T5ForConditionalGeneration"]}
    assert kind == "vit"
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    more = {"intermediate_size": inner, "image_size": 16, "patch_size": 4, "num_labels": 10}
    del common["vocab_size"]
    return {**common, **more, **none, "architectures": ["ViTForImageClassification"]}
