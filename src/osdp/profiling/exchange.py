"""The host's own time for one gather or reduction of a unit: what FSDP2 and the courier do beside the bytes.

[Note: Exchange]
A stack of tiny blocks is trained by the real engine, every block a unit that is freed after use. Its parameters are
next to nothing, so a step takes the blocks' compute, which is timed without FSDP2 as in [Note: Timed stages], the
collectives' latencies, which are fitted before, and the host's time for three exchanges a unit. `exchange_seconds` is
what makes the predicted step equal the measured one, and at least 0. A block here has as many tensors as one of a small
transformer, because the host handles each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from osdp.api import plan_units
from osdp.cluster import Cluster
from osdp.cost.graph import step_graph
from osdp.cost.layout import Layout, Shape, Shapes
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, Option
from osdp.model.source import ModelSource, output_loss
from osdp.planfile import FREE, Plan, unpriced_plan
from osdp.profiling.bench import Bench
from osdp.profiling.stages import time_stages
from osdp.runtime.apply import parallelize

BLOCKS, LINEARS, WIDTH, BATCH = 16, 4, 8, 1
_TRAINING = Training.of("fp32", "sgd")
_MOST_SECONDS = 0.9


@dataclass(frozen=True)
class Exchange:
    """The answer, and the step that it was read off: measured, and predicted with no time of the host's own."""

    seconds: float
    measured_step_seconds: float
    predicted_step_seconds: float


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.relu(linear(x))
        return x


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def time_exchange(bench: Bench, cluster: Cluster, *, within: float) -> Exchange:
    """See [Note: Exchange]; `cluster` has the collectives as fitted."""
    source = ModelSource("a stack", _Stack, _inputs, output_loss, None, None, None, "")
    graph = source.capture("fp32")
    memory = cluster.limit_bytes
    timed = time_stages(bench, source, graph, batches=(BATCH,), memory_bytes=memory, within=within / 3)
    cluster = replace(cluster, stages=timed.stages, exchange_seconds=0.0)
    bench.watch("exchanges")
    shapes = Shapes(graph)
    layout = shapes.layout([Shape(WHOLE)] * len(graph.stages))
    measured = bench.seconds(_trained(layout, cluster, bench.device), within=within * 2 / 3)

    def predicted(exchange: float) -> float:
        options = [Option(FREE)] * len(layout.units)
        time = step_graph(layout, options, BATCH, _TRAINING, replace(cluster, exchange_seconds=exchange)).time()
        return time.total - time.optimizer

    return Exchange(solve(predicted, measured), measured, predicted(0.0))


def solve(predicted: Callable[[float], float], measured: float) -> float:
    """Where a prediction that grows meets what was measured; 0 where it exceeds it from the start."""
    low, high = 0.0, _MOST_SECONDS
    if predicted(low) >= measured:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return high


def _inputs(batch: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.empty(batch, WIDTH, device="meta"),), {}


def _trained(layout: Layout, cluster: Cluster, device: torch.device) -> Callable[[], None]:
    """A forward and a backward of the stack under the real engine."""
    torch.manual_seed(0)  # ranks must begin with equal weights
    model = _Stack().to(device)
    parallelize(model, _plan(layout, cluster), device_type=device.type)
    values = torch.ones(BATCH, WIDTH, device=device)

    def step() -> None:
        model(values).backward()
        model.zero_grad(set_to_none=True)

    return step


def _plan(layout: Layout, cluster: Cluster) -> Plan:
    return unpriced_plan(
        "a stack",
        plan_units(layout, [Option(FREE)] * len(layout.units)),
        cluster,
        precision=_TRAINING.precision.name,
        reduce_dtype=_TRAINING.reduce_dtype,
        optimizer=_TRAINING.optimizer.name,
        batch_size=BATCH,
    )
