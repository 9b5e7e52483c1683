"""The whole job on all ranks: plan, run it for a few steps, correct the profile, plan again, until nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from osdp.cluster import Cluster
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, OsdpError, UsageError
from osdp.model.graph import ModelGraph
from osdp.model.source import ModelSource
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.profiling.trial import Trial, try_plan
from osdp.recompute import Recompute
from osdp.runtime.consistency import by_rank_0
from osdp.training.world import World
from osdp.tuning.calibrate import Factors, MeasuredStep, calibrate, corrected

MOST_ROUNDS = 5
ENOUGH = 0.02  # where prediction and step agree so far, nothing more is to be learnt

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is tuned: training and restrictions as in a plan; `candidates` further plans are run at the end."""

    training: Training
    rules: Rules
    batch: int | None
    global_batch: int | None
    candidates: int
    steps: int


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was run, how it came about, and what was measured beside its prediction."""

    origin: str
    plan: Plan
    trial: Trial

    @property
    def samples_per_second(self) -> float:
        return self.plan.global_batch / self.trial.step_seconds

    @property
    def error(self) -> float:
        """How far the prediction lies above the measured step, as a part of it."""
        return self.plan.predicted.step_seconds / self.trial.step_seconds - 1

    @property
    def fits(self) -> bool:
        return self.trial.peak_bytes <= self.plan.predicted.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "batch_size": self.plan.batch_size,
            "accumulation": self.plan.accumulation,
            "predicted_step_seconds": self.plan.predicted.step_seconds,
            "step_seconds": self.trial.step_seconds,
            "samples_per_second": self.samples_per_second,
            "predicted_peak_bytes": self.plan.predicted.peak_bytes,
            "peak_bytes": self.trial.peak_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Tuned:
    """The fastest plan of those that ran, all of them, and the profile as it is now known."""

    best: TriedPlan
    tried: tuple[TriedPlan, ...]
    cluster: Cluster
    factors: Factors
    stopped: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "stopped": self.stopped,
            "factors": asdict(self.factors),
            "tried": [each.to_dict() for each in self.tried],
            "best": self.tried.index(self.best),
            "plan": self.best.plan.to_dict(),
            "cluster": self.cluster.to_dict(),
        }


class Tuner:
    """Runs on every rank alike: all see the same measurements, and rank 0 plans for all."""

    def __init__(self, source: ModelSource, graph: ModelGraph, cluster: Cluster, wanted: Wanted, world: World) -> None:
        self.source, self.graph, self.cluster = source, graph, cluster
        self.wanted, self.world = wanted, world
        self.tried: list[TriedPlan] = []
        self.factors = Factors()

    def tuned(self, say: Say) -> Tuned:
        stopped = self._rounds(say)
        for origin, plan in self._others() if self.wanted.candidates else ():
            self._try(origin, plan, say)
        self.factors = self._learnt()
        fitting = [each for each in self.tried if each.fits]
        if not fitting:
            raise OsdpError("every plan that ran took more memory than the limit; give a smaller --memory")
        best = max(fitting, key=lambda each: each.samples_per_second)
        return Tuned(best, tuple(self.tried), corrected(self.cluster, self.factors), self.factors, stopped)

    def _rounds(self, say: Say) -> str:
        """Plans and runs until nothing changes; gives the reason to stop."""
        for number in range(1, MOST_ROUNDS + 1):
            plan = self._plan(self.wanted.rules, self.wanted.batch)
            if plan is None:
                raise UsageError("no plan fits the memory; see `osdp plan` with the same arguments for what would")
            if self._ran(plan):
                return "the corrected profile plans what was run already"
            found = self._try(f"round {number}", plan, say)
            if abs(found.error) <= ENOUGH:
                return f"prediction and step agree within {ENOUGH:.0%}"
            self.factors = self._learnt()
        return f"after {MOST_ROUNDS} rounds"

    def _learnt(self) -> Factors:
        return calibrate(self.cluster, [self._measured(each) for each in self.tried])

    def _others(self) -> list[tuple[str, Plan]]:
        """As many plans that did not run yet as are wanted, the best predicted ones."""
        found: list[tuple[str, Plan]] = []
        for origin, rules, batch in self._families():
            plan = self._plan(rules, batch)
            if plan is not None and not self._ran(plan) and not any(_alike(plan, other) for _, other in found):
                found.append((origin, plan))
        found.sort(key=lambda other: -other[1].predicted.samples_per_second)
        return found[: self.wanted.candidates]

    def _families(self) -> Iterator[tuple[str, Rules, int | None]]:
        """Where a mistake of the model would show: other batch sizes, and plans without what the best one uses."""
        rules, best = self.wanted.rules, max(self.tried, key=lambda each: each.samples_per_second).plan
        if self.wanted.global_batch is None and self.wanted.batch is None:
            for size in (best.batch_size // 2, best.batch_size - 1, best.batch_size * 3 // 4):
                if size >= 1:
                    yield f"batch {size}", rules, size
        batch = self.wanted.batch
        yield "no recompute", replace(rules, recompute=(Recompute.NONE,)), batch
        yield "no slices", replace(rules, split=False), batch
        for mode in rules.modes:
            yield f"all {mode}", replace(rules, modes=(mode,), split=False), batch

    def _plan(self, rules: Rules, batch: int | None) -> Plan | None:
        cluster = corrected(self.cluster, self.factors)
        try:
            return by_rank_0(
                partial(
                    plan_graph,
                    self.graph,
                    cluster,
                    self.wanted.training,
                    rules,
                    batch=batch,
                    global_batch=self.wanted.global_batch if batch is None else None,
                )
            )
        except (DoesNotFit, UsageError):  # a family may not exist on this cluster
            return None

    def _try(self, origin: str, plan: Plan, say: Say) -> TriedPlan:
        say(f"{origin}: running {self.wanted.steps} steps at batch {plan.batch_size}")
        found = TriedPlan(origin, plan, try_plan(self.source, plan, self.world, steps=self.wanted.steps))
        self.tried.append(found)
        say(
            f"{origin}: a step takes {found.trial.step_seconds:.4g} s, "
            f"{plan.predicted.step_seconds:.4g} s predicted; "
            f"{found.samples_per_second:.4g} samples/s"
        )
        return found

    def _ran(self, plan: Plan) -> bool:
        return any(_alike(each.plan, plan) for each in self.tried)

    def _measured(self, tried: TriedPlan) -> MeasuredStep:
        def predict(cluster: Cluster) -> float:
            return step_graph_of(replace(tried.plan, cluster=cluster), self.graph).seconds

        return MeasuredStep(predict, tried.trial.step_seconds)


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans run alike, whatever their clusters' figures."""
    return (one.units, one.batch_size, one.accumulation) == (other.units, other.batch_size, other.accumulation)
