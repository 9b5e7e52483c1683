"""A plan tried for a few steps on the real ranks: what a step takes, and what it holds at most.

[Note: Allocator]
On accelerators the allocator counts for itself. On CPUs torch's profiler reports every allocation and every
free; what was there before the step (parameters, optimizer states, buffers, inputs) is counted by storage and added.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp._torch import tree_leaves
from osdp.accelerator import DeviceCalls
from osdp.cpu_memory import peak_above_start
from osdp.model.source import ModelSource
from osdp.planfile import Plan
from osdp.profiling.stages import random_inputs
from osdp.runtime.accumulate import accumulate
from osdp.runtime.apply import parallelize
from osdp.runtime.initialize import initialize
from osdp.runtime.local import local_tensor
from osdp.training.optimizer import optimizer_of
from osdp.training.world import World

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Trial:
    """Seconds of a step, each try's and their median, on the slowest rank; `peak_bytes` is the highest rank's."""

    step_seconds: float
    tries: tuple[float, ...]
    peak_bytes: int


class Tried:
    """A model under a plan on this rank, ready to take steps on random data."""

    def __init__(self, source: ModelSource, plan: Plan, world: World) -> None:
        self.plan, self.world, self._loss = plan, world, source.loss
        self.calls = DeviceCalls(world.device)
        dtype = torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            self.model = parallelize(source.build_on_meta().to(dtype), plan, device=world.device)
        initialize(self.model, seed=0, device=world.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer_of(plan.optimizer, trained, lr=1e-4)
        torch.manual_seed(world.rank)
        self.inputs: Any = random_inputs(source, self.model, plan.batch_size, world.device, dtype)

    def step(self) -> None:
        args, kwargs = self.inputs
        for _ in accumulate(self.model, range(self.plan.accumulation)):
            (self._loss(self.model(*args, **kwargs)) / self.plan.accumulation).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held_bytes(self) -> int:
        """What lasts from step to step; see [Note: Allocator]."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        inputs = [t for t in tree_leaves(self.inputs) if isinstance(t, Tensor)]
        return storage_bytes((*self.model.parameters(), *self.model.buffers(), *states, *inputs))

    def seconds(self, steps: int) -> float:
        """Of one step, from so many in a row, after one that is not timed: in training the same was done before."""
        self.step()
        dist.barrier()
        began = perf_counter()
        for _ in range(steps):
            self.step()
        self.calls.synchronize()
        return (perf_counter() - began) / steps

    def peak_bytes(self) -> int:
        if self.calls.has_streams:
            self.calls.forget_peak()
            self.step()
            return self.calls.peak_bytes()
        return self.held_bytes() + peak_above_start(self.step)


class Trials:
    """Plans that are all held in memory and tried in turn: whatever else the machines do meanwhile slows all alike."""

    def __init__(self, source: ModelSource, plans: Sequence[Plan], world: World) -> None:
        """Takes the first steps of each, the last of them under the allocator's account."""
        self._world = world
        self._tried = [Tried(source, plan, world) for plan in plans]
        self._seconds: list[list[float]] = [[] for _ in plans]
        self._peaks = []
        for tried in self._tried:
            for _ in range(WARM_UP_STEPS):
                tried.step()
            self._peaks.append(tried.peak_bytes())

    def take(self, steps: int) -> None:
        """Times so many steps of each plan."""
        for tried, seconds in zip(self._tried, self._seconds, strict=True):
            seconds.append(tried.seconds(steps))

    def found(self) -> list[Trial]:
        """Of each plan what was measured so far; equal on all ranks."""
        found = []
        for peak, seconds in zip(self._peaks, self._seconds, strict=True):
            highest, *slowest = (max(column) for column in zip(*self._world.all_numbers(peak, *seconds), strict=True))
            found.append(Trial(statistics.median(slowest), tuple(slowest), int(highest)))
        return found


def try_plan(source: ModelSource, plan: Plan, world: World, *, steps: int = 3, tries: int = 3) -> Trial:
    """Trains a few steps on all ranks at once and lets go of the model."""
    trials = Trials(source, [plan], world)
    for _ in range(tries):
        trials.take(steps)
    return trials.found()[0]


def storage_bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    """Of each storage once."""
    storages = {local_tensor(t).untyped_storage()._cdata: local_tensor(t).untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
