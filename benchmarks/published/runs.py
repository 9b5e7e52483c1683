"""The published runs: rows of a CSV, the models that ran, and their step as the cost model prices it."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from osdp.cluster import Cluster
from osdp.cost.graph import StepGraph, step_graph
from osdp.cost.layout import Layout, Variant, Variants
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.model.capture import capture
from osdp.model.gpt import GPT, GPTConfig
from osdp.model.graph import ModelGraph
from osdp.recompute import Recompute
from osdp.sharding import FREE, KEEP

HERE = Path(__file__).parent
DEVICES = {"a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB", "h100_80gb": "H100-80GB"}
MODES = {"FULL_SHARD": FREE, "SHARD_GRAD_OP": KEEP}
PRECISIONS = {"amp_bf16": "bf16", "bf16": "pure-bf16"}  # fp8 products are not priced
ATTENTION = "flash-1"  # software of 2023
DEVICES_PER_NODE = 8
NETWORKS = {"a100_40gb": 200e9, "a100_80gb": 200e9, "h100_80gb": 400e9}  # bytes a second of a node's ports


@dataclass(frozen=True)
class Run:
    """One published run."""

    model: str
    layers: int
    width: int
    heads: int
    vocab: int
    seq_len: int
    gpus: int
    gpu: str
    micro_batch: int
    accumulation: int
    precision: str
    sharding: str
    full_recompute: bool
    parameters: int
    tokens_per_second_per_gpu: float

    @property
    def is_priced(self) -> bool:
        return self.precision in PRECISIONS

    @property
    def step_seconds(self) -> float:
        tokens = self.micro_batch * self.accumulation * self.seq_len
        return tokens / self.tokens_per_second_per_gpu

    @property
    def cluster(self) -> Cluster:
        per_node = min(self.gpus, DEVICES_PER_NODE)
        shape = {"nodes": self.gpus // per_node, "devices_per_node": per_node}
        return Cluster.of(DEVICES[self.gpu], **shape, attention=ATTENTION)

    @property
    def mode(self) -> str:
        return MODES[self.sharding]

    @property
    def network_bytes_per_second(self) -> float:
        return NETWORKS[self.gpu]

    @property
    def training(self) -> Training:
        return replace(Training.of(PRECISIONS[self.precision]), accumulation=self.accumulation)


def read_runs(path: Path) -> list[Run]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    whole = ("layers", "width", "heads", "vocab", "seq_len", "gpus", "micro_batch", "accumulation", "parameters")
    return Run(
        model=row["model"],
        gpu=row["gpu"],
        precision=row["precision"],
        sharding=row["sharding"],
        full_recompute=row["full_recompute"] == "True",
        tokens_per_second_per_gpu=float(row["tokens_per_second_per_gpu"]),
        **{key: int(row[key]) for key in whole},
    )


@torch.library.custom_op("published::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows, in one kernel that reads the logits once."""
    wide = logits.float()
    total = wide.logsumexp(-1)
    return total - wide.gather(-1, targets[:, None])[:, 0], total


@_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("published::cross_entropy_backward_", mutates_args=("logits",))
def _cross_entropy_backward(logits: Tensor, total: Tensor, targets: Tensor, grad: Tensor) -> None:
    """The gradient, written over the logits."""
    wide = (logits.float() - total[:, None]).exp()
    wide.scatter_add_(-1, targets[:, None], torch.full_like(total[:, None], -1.0))
    logits.copy_(wide * grad[:, None])


@_cross_entropy_backward.register_fake
def _(logits: Tensor, total: Tensor, targets: Tensor, grad: Tensor) -> None:
    return None


class FusedCrossEntropy(torch.autograd.Function):
    """The cross entropy that these runs used: no fp32 logits, and the gradient takes the logits' place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, total = torch.ops.published.cross_entropy(logits, targets)
        ctx.save_for_backward(logits, total, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, total, targets = ctx.saved_tensors
        torch.ops.published.cross_entropy_backward_(logits, total, targets, grad)
        return logits, None


class MPT(GPT):
    """GPT with learned positions and a tied head, trained with the fused loss."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens)
        if targets is None:
            return logits
        return FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten()).mean()


@cache
def _graph(layers: int, width: int, heads: int, vocab: int, seq_len: int) -> ModelGraph:
    with torch.device("meta"):
        model = MPT(GPTConfig(vocab, seq_len, (layers,), (width,), head_width=width // heads))

    def inputs(batch: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        tokens = torch.empty(batch, seq_len, dtype=torch.long, device="meta")
        return (tokens, tokens.clone()), {}

    return capture(model, inputs, compute_dtype="bf16", seq_len=seq_len, name="mpt")


def graph_of(run: Run) -> ModelGraph:
    return _graph(run.layers, run.width, run.heads, run.vocab, run.seq_len)


def layout_of(run: Run, graph: ModelGraph) -> Layout:
    """Every block whole; recomputed if the run did so."""
    variants = Variants(graph)

    def chosen(index: int, plain: Variant) -> Variant:
        again = replace(plain, recompute=Recompute.FULL)
        return again if run.full_recompute and again in variants.of(index) else plain

    return variants.layout([chosen(index, plain) for index, plain in enumerate(variants.plainest())])


def step_of(run: Run, layout: Layout, cluster: Cluster | None = None) -> StepGraph:
    """The step as it was run: all units in one mode, gradients reduced at every micro-batch."""
    options = [Option(run.mode)] * len(layout.units)
    return step_graph(layout, options, run.micro_batch, run.training, cluster or run.cluster)


def predicted_seconds(step: StepGraph) -> float:
    """The one place that says which of the cost model's times is compared."""
    return step.seconds
