"""Saved activations of a layer as traced for an accelerator, beside the analytic size.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equation 1: a layer of
hidden size h with a heads saves s·b·h·(34 + 5·a·s/h) bytes in 16 bits at sequence length s and batch b, of which the
second term is the scores. A fused kernel saves the logarithms of the sums instead, 4·s·b·a bytes. ReLU saves its
output, which is the next product's input anyway: 8·s·b·h less. GPT-2 is taken with the fused form of its GELU; its
default, `gelu_new`, is a row of kernels that save more.

    python -m benchmarks.bench_activations
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from osdp.cluster.device import Device, device
from osdp.model.capture import capture

_GPT2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "activation_function": "gelu_pytorch_tanh"}
_OPT = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_GPT2_MEDIUM = {**_GPT2, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Case:
    """A published configuration with its usual dropout of 0.1; `relu` and `width` enter the formula."""

    name: str
    fields: dict[str, Any]
    length: int
    width: int
    heads: int
    masked: bool = False
    relu: bool = False


CASES = (
    Case("bert-large", {"model_type": "bert", **_BERT}, 512, 1024, 16, masked=True),
    Case("bert-large, with an attention mask", {"model_type": "bert", **_BERT}, 512, 1024, 16, masked=True),
    Case("gpt2-medium", _GPT2_MEDIUM, 1024, 1024, 16),
    Case("opt-1.3b", {"model_type": "opt", "word_embed_proj_dim": 2048, **_OPT}, 2048, 2048, 32, relu=True),
)


@dataclass(frozen=True)
class Row:
    """Bytes that one layer saves for one sample."""

    model: str
    traced_for_accelerator: int
    traced_for_cpu: int
    analytic_fused: int
    analytic_not_fused: int

    @property
    def off(self) -> float:
        return self.traced_for_accelerator / self.analytic_fused - 1


def measured(case: Case, target: Device | None, *, with_mask: bool) -> int:
    config = AutoConfig.for_model(**copy.deepcopy(case.fields))
    with torch.device("meta"):
        kind = AutoModelForMaskedLM if case.masked else AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation="sdpa").train()
    tokens = torch.empty(2, case.length, dtype=torch.long, device="meta")
    inputs = {"input_ids": tokens, "labels": tokens}
    if with_mask:
        mask = torch.ones(2, case.length, dtype=torch.long)
        mask[:, -3:] = 0
        inputs["attention_mask"] = mask
    graph = capture(model, inputs, compute_dtype="bf16", device=target)
    return graph.blocks[3].plain.forward_delta.per_sample


def row(case: Case) -> Row:
    with_mask = "mask" in case.name
    size, scores = case.length * case.width, case.heads * case.length**2
    rest = size * (26 if case.relu else 34)
    sums, mask = 4 * case.heads * case.length, 2 * case.length**2 if with_mask else 0
    return Row(
        case.name,
        measured(case, device("A100-80GB"), with_mask=with_mask),
        measured(case, None, with_mask=with_mask),
        rest + sums + mask,
        rest + 5 * scores,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    arguments = parser.parse_args()
    if not arguments.json:
        print("| model | traced for an A100 | analytic, fused | off | traced for CPUs | analytic, not fused |")
        print("|---|---|---|---|---|---|")
    for case in CASES:
        found = row(case)
        if arguments.json:
            print(json.dumps({**asdict(found), "off": found.off}), flush=True)
            continue
        sizes = [found.traced_for_accelerator, found.analytic_fused, found.traced_for_cpu, found.analytic_not_fused]
        shown = [f"{each / 2**20:.1f} MiB" for each in sizes]
        print(f"| {found.model} | {shown[0]} | {shown[1]} | {found.off:+.1%} | {shown[2]} | {shown[3]} |", flush=True)


if __name__ == "__main__":
    main()
