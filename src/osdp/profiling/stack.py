"""A stack of equal transformer blocks on random numbers, run with and without the engine, its passes timed apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.api import plan_units
from osdp.cluster import Cluster, TimedStage
from osdp.cost.graph import step_graph
from osdp.cost.layout import Shape, Shapes
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, Option
from osdp.model.gpt import Block
from osdp.model.source import ModelSource, output_loss
from osdp.planfile import unpriced_plan
from osdp.profiling.bench import LEAST_TRIES, Bench
from osdp.runtime.apply import parallelize

BLOCKS, LENGTH, HEAD_WIDTH = 8, 16, 64
_MOST_ROUNDS = 200
_TRAINING = Training.of("fp32", "sgd")


class Passes(NamedTuple):
    """Seconds of a step's two passes, without the optimizer."""

    forward: float
    backward: float


Run = Callable[[], Passes]


class _Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, min(HEAD_WIDTH, width)) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Stack:
    """Blocks of one width at one batch size: how to run them, and what a cluster's figures predict for them."""

    def __init__(self, width: int, batch: int, device: torch.device) -> None:
        self.width, self.batch, self._device = width, batch, device
        source = ModelSource("a stack", self._build, self._inputs, output_loss, None, None, None, "")
        graph = source.capture("fp32")
        self._stages = graph.stages
        self._layout = Shapes(graph).layout([Shape(WHOLE)] * len(graph.stages))

    def _build(self) -> nn.Module:
        return _Blocks(self.width)

    def _inputs(self, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.empty(batch, LENGTH, self.width, device="meta"),), {}

    def plain(self) -> Run:
        return self._run(self._build().to(self._device))

    def under(self, option: Option, cluster: Cluster) -> Run:
        """The blocks under the real engine, each a unit that takes this option."""
        torch.manual_seed(0)  # ranks must begin with equal weights
        model = self._build().to(self._device)
        plan = unpriced_plan(
            "a stack",
            plan_units(self._layout, [option] * len(self._layout.units)),
            cluster,
            precision=_TRAINING.precision.name,
            reduce_dtype=_TRAINING.reduce_dtype,
            optimizer=_TRAINING.optimizer.name,
            batch_size=self.batch,
        )
        parallelize(model, plan, device_type=self._device.type)
        return self._run(model)

    def _run(self, model: nn.Module) -> Run:
        return partial(_timed_passes, model, torch.ones(self.batch, LENGTH, self.width, device=self._device))

    def timed_stages(self, plain: Passes) -> tuple[TimedStage, ...]:
        """A stack's passes, as timed without the engine, divided over its blocks."""
        forward, backward = plain.forward / BLOCKS, plain.backward / BLOCKS
        found = {
            stage.plain.signature: TimedStage(
                stage.plain.signature,
                stage.name,
                (self.batch,),
                (forward if stage.is_block else 0.0,),
                (backward if stage.is_block else 0.0,),
            )
            for stage in self._stages
        }
        return tuple(found.values())

    def predicted(self, option: Option, cluster: Cluster) -> Passes:
        graph = step_graph(self._layout, [option] * len(self._layout.units), self.batch, _TRAINING, cluster)
        return Passes(*(graph.pass_seconds(each) for each in Passes._fields))


def _timed_passes(model: nn.Module, values: Tensor) -> Passes:
    """This rank's seconds; all ranks begin each pass together, as ranks that share processors slow each other."""
    began = _now(values.device)
    loss = model(values)
    turned = _now(values.device)
    dist.barrier()
    again = _now(values.device)
    loss.backward()
    ended = _now(values.device)
    model.zero_grad(set_to_none=True)
    return Passes(turned - began, ended - again)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def timed_in_turn(bench: Bench, runs: Sequence[Run], *, within: float) -> list[Passes]:
    """The passes of each, in rounds of all of them: whatever else the machines do meanwhile slows all alike."""
    for run in (*runs, *runs):
        run()
    rounds: list[list[Passes]] = []
    tries = 1
    while len(rounds) < tries:
        rounds.append([])
        for run in runs:
            dist.barrier()
            rounds[-1].append(run())
        bench.watch(f"round {len(rounds)}")
        if len(rounds) == 1:
            (once,) = bench.slowest(sum(sum(passes) for passes in rounds[0]))
            tries = max(LEAST_TRIES, min(_MOST_ROUNDS, int(within / max(once, 1e-6))))
    slowest = bench.slowest(*np.median(np.array(rounds), axis=0).flatten().tolist())
    return [Passes(*seconds) for seconds in np.array(slowest).reshape(len(runs), -1).tolist()]
