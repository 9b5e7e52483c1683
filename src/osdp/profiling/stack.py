"""A stack of equal transformer blocks on random numbers, run with and without the engine, its passes timed apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.answer import plan_units
from osdp.cluster import Cluster, TimedStage
from osdp.cost.graph import step_graph
from osdp.cost.layout import Variant, Variants
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, Option
from osdp.model.gpt import Block
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource, output_loss
from osdp.planfile import Granularity, unpriced_plan
from osdp.profiling.bench import Bench
from osdp.profiling.rounds import typical
from osdp.runtime.apply import parallelize
from osdp.runtime.consistency import by_rank_0

BLOCKS, LENGTH, HEAD_WIDTH = 8, 16, 64
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


@cache
def _captured(width: int) -> ModelGraph:
    def inputs(batch: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.empty(batch, LENGTH, width, device="meta"),), {}

    source = ModelSource("a stack", partial(_Blocks, width), inputs, output_loss, None, None, None, "")
    return source.capture("fp32")


class Stack:
    """Blocks of one width at one batch size: how to run them, and what a cluster's figures predict for them.

    Each block is a unit, or by operators several.
    """

    def __init__(self, width: int, batch: int, device: torch.device, granularity: Granularity = WHOLE) -> None:
        self.width, self.batch, self._device = width, batch, device
        graph = by_rank_0(lambda: _captured(width))
        self._stages = graph.stages
        self._layout = Variants(graph).layout([Variant(granularity)] * len(graph.stages))

    def plain(self, now: Callable[[], float]) -> Run:
        """The blocks without the engine, by this clock."""
        return partial(self._run(_Blocks(self.width).to(self._device)), now=now)

    def under(self, option: Option, cluster: Cluster, now: Callable[[], float]) -> Run:
        """The blocks under the real engine, all units of which take this option, by this clock."""
        torch.manual_seed(0)  # ranks must begin with equal weights
        model = _Blocks(self.width).to(self._device)
        plan = unpriced_plan(
            "a stack",
            plan_units(self._layout, [option] * len(self._layout.units)),
            cluster,
            precision=_TRAINING.precision.name,
            reduce_dtype=_TRAINING.reduce_dtype,
            optimizer=_TRAINING.optimizer.name,
            batch_size=self.batch,
        )
        parallelize(model, plan, device=self._device)
        return partial(self._run(model), now=now, together=dist.barrier)

    def _run(self, model: nn.Module) -> Callable[..., Passes]:
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
        forward, both = graph.pass_seconds()
        return Passes(forward, both - forward)


def _timed_passes(
    model: nn.Module,
    values: Tensor,
    *,
    now: Callable[[], float],
    together: Callable[[], object] = lambda: None,
) -> Passes:
    """This rank's seconds; `together` lets all ranks begin a pass at once."""
    together()
    began = now()
    loss = model(values)
    turned = now()
    together()
    again = now()
    loss.backward()
    ended = now()
    model.zero_grad(set_to_none=True)
    return Passes(turned - began, ended - again)


class Turns:
    """A stack's passes under a few options, in turn with those of its blocks without the engine."""

    def __init__(self, bench: Bench, stack: Stack, options: Sequence[Option], cluster: Cluster) -> None:
        self.stack, self.options, self._bench = stack, options, bench
        self._plain = stack.plain(bench.by_processor)
        self._runs = [stack.under(option, cluster, bench.by_clock) for option in options]
        self._taken: list[list[Passes]] = []
        for run in (self._plain, *self._runs):
            run()  # warms up
        self._steps = bench.steps_of_a_try(sum(self._plain()))

    def take(self) -> None:
        own = [Passes(*self._bench.computed(self._steps, lambda: np.array(self._plain())))]
        for run in self._runs:
            run()  # what ran before has left the caches and the heap as it needed them
            own.append(run())
        self._taken.append(own)

    def passes(self) -> list[Passes]:
        """What is typical of the slowest rank: without the engine, then of every option."""
        slowest = self._bench.slowest(*typical(np.array(self._taken)).flatten().tolist())
        found = np.array(slowest).reshape(1 + len(self._runs), -1)
        found[0] *= self._bench.clock_factor
        return [Passes(*seconds) for seconds in found.tolist()]
