"""One measure for all planners: an answer is a choice of osdp's tables, judged by osdp's time model and timeline.

What an answer needs is also measured, if asked for, in a dry run: one step of real FSDP2 on fake tensors.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from captured import captured

from osdp.answer import plan_model, plan_units, predicted_of
from osdp.api import resolve
from osdp.batching import LARGEST_MICRO_BATCH
from osdp.cluster import Cluster
from osdp.cost.graph import StepGraph, step_graph
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model
from osdp.planfile import Plan, unpriced_plan
from osdp.search.batches import largest_batch
from osdp.search.problem import Problem, StageChoice
from osdp.verify import verify

T = TypeVar("T")
FINER = 1.4  # the ratio of two batch sizes that are tried one after the other


@dataclass(frozen=True)
class Case:
    """One problem: every planner gets the model, the devices and the precision."""

    model: str
    cluster: str
    memory: str
    precision: str = "bf16"

    @property
    def training(self) -> Training:
        return Training.of(self.precision)

    @property
    def devices(self) -> Cluster:
        return resolve(self.cluster, self.memory)

    @property
    def graph(self) -> ModelGraph:
        return captured(self.model, self.training, self.devices.device)


class Space:
    """The problems of a case under some rules, at any batch size, and the steps that choices of them are."""

    def __init__(self, case: Case, rules: Rules, *, recomputed: bool | None = None) -> None:
        self.case, self.cluster = case, case.devices
        self.tables = Tables(case.graph, self.cluster, case.training, rules)
        self.recomputed = recomputed if recomputed in self.tables.recompute_cases else None

    def problem(self, batch: int) -> Problem:
        return self.tables.problem(batch, limit=self.cluster.limit_bytes, recomputed=self.recomputed)

    def sizes(self) -> list[int]:
        """The batch sizes to try: each up to 1.4 times the one before, up to the largest that may fit."""
        most = largest_batch(lambda batch, _: self.problem(batch), most=LARGEST_MICRO_BATCH)
        found, size = [], 1.0
        while size < most:
            found.append(int(size))
            size = max(size + 1, size * FINER)
        return [*dict.fromkeys(found), *([most] if most else [])]

    def step(self, batch: int, choice: Sequence[StageChoice]) -> StepGraph:
        layout, options = self.tables.read(self.problem(batch), choice)
        return step_graph(layout, options, batch, self.case.training, self.cluster)


@dataclass(frozen=True)
class Answer:
    """A planner's answer by osdp's measure; `dry_run_bytes` is None where no dry run was asked for."""

    planner: str
    samples_per_second: float
    batch: int
    peak_bytes: int
    limit_bytes: int
    search_seconds: float
    dry_run_bytes: int | None = None
    notes: str = ""

    @property
    def measured_peak(self) -> int:
        return self.peak_bytes if self.dry_run_bytes is None else self.dry_run_bytes

    @property
    def fits(self) -> bool:
        return self.measured_peak <= self.limit_bytes


def plan_of(case: Case, step: StepGraph) -> Plan:
    """A step as a plan that nobody searched for, with osdp's prediction of it."""
    training, units = case.training, plan_units(step.layout, step.options)
    named = {"precision": training.precision.name, "reduce_dtype": training.reduce_dtype}
    about = {"batch_size": step.batch, "accumulation": 1, "optimizer": training.optimizer.name}
    plan = unpriced_plan(case.model, units, case.devices, **named, **about)
    return replace(plan, model=plan_model(case.graph, step.layout), predicted=predicted_of(step))


def judged(planner: str, case: Case, plan: Plan, *, seconds: float, dry: bool, notes: str = "") -> Answer:
    step = plan.predicted
    measured = dry_run_bytes(case, plan) if dry else None
    found = step.samples_per_second, plan.batch_size * plan.accumulation, step.peak_bytes, step.limit_bytes
    return Answer(planner, *found, seconds, measured, notes)


def dry_run_bytes(case: Case, plan: Plan) -> int:
    source = load_model(case.model)
    found = verify(plan, case.graph, build=source.build_on_meta, inputs=source.inputs, loss=source.loss)
    return found.measured_peak_bytes


def cpu_seconds() -> float:
    """Of this process and of those that it waited for: what others do on the machine is not counted."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_timed(run: Callable[[], T]) -> tuple[T, float]:
    began = cpu_seconds()
    result = run()
    return result, cpu_seconds() - began
