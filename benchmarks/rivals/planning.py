"""What osdp needs before it trains: a profile of these ranks with this model, then plans within the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.profiling.run import Wanted, profile_in
from osdp.recompute import Recompute
from osdp.runtime.consistency import by_rank_0
from osdp.sharding import FREE, REPLICATE

from .bench import Bench
from .models import source_of
from .planned import OPTIMIZER, planned, uniform_rules
from .rivals import OSDP, PAPER, TUNED
from .ways import BY_PLAN, Candidate

TIMEOUT_SECONDS = 300.0
SEARCH_SECONDS = 5.0  # a quarter of the default of `osdp plan`; the gap that is left is in the log
MOST_PLANS = 3  # where the meter finds more than the limit, a plan for as much less
# `osdp tune` runs plans without what the best one uses, and takes the fastest: it is to osdp what trials are to rivals.
RULES: Mapping[str, Sequence[Rules]] = {
    OSDP: (Rules(),),
    PAPER: (Rules(modes=(REPLICATE, FREE), split=False, two_levels=False),),
    TUNED: (Rules(recompute=(Recompute.NONE,)), Rules(modes=(REPLICATE,), split=False)),
}


def measure_profile(bench: Bench, *, seconds: float) -> None:
    """Profiles the ranks of a setting with its model, once; the log keeps the cluster as it was measured."""
    if bench.log.last("profile") is None:
        source = source_of(bench.setting.model, bench.setting.shape)
        wanted = Wanted(source, None, "fp32", seconds, TIMEOUT_SECONDS, None, None, quiet=True)
        found = profile_in(bench.world, wanted)
        bench.log.add("profile", cluster=found.cluster.to_dict(), notes=list(found.notes))


def searched(plan: Callable[[], Plan]) -> Plan:
    """By rank 0, in a thread of its own: a rank's first thread has the share of a device alone, and a search has none.

    See [Note: Devices] in benchmarks.cluster.devices.
    """

    def beside() -> Plan:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(plan).result()

    return by_rank_0(beside)


@dataclass(frozen=True)
class Planner:
    """A captured model and the cluster as it was measured."""

    graph: ModelGraph
    cluster: Cluster
    training: Training

    @staticmethod
    def of(bench: Bench) -> Planner:
        """From the profile in the log."""
        found = bench.log.last("profile")
        if found is None:
            raise SystemExit(f"{bench.setting.name} has no profile yet; run the stage `profile` before")
        source = source_of(bench.setting.model, bench.setting.shape)
        graph = by_rank_0(lambda: source.capture("fp32"))
        return Planner(graph, Cluster.from_dict(found["cluster"]), Training.of("fp32", OPTIMIZER))

    def within(self, limit_bytes: int) -> Cluster:
        return replace(self.cluster, memory_bytes=limit_bytes, reserve_fraction=0.0)

    def best(self, rules: Rules, limit_bytes: int, *, batch: int | None = None) -> Plan:
        """The planner's choice, batch and all; raises DoesNotFit on all ranks."""
        cluster = self.within(limit_bytes)
        limits: dict[str, Any] = {"batch": batch, "search_seconds": SEARCH_SECONDS}
        return searched(lambda: plan_graph(self.graph, cluster, self.training, rules, **limits))

    def freed(self, batch: int, recompute: str) -> Plan:
        """FSDP2's plan at a batch size."""
        cluster = self.within(1 << 36)
        rules = uniform_rules(FREE, recompute)
        return searched(lambda: plan_graph(self.graph, cluster, self.training, rules, batch=batch))


def make_plans(
    bench: Bench, planner: Planner, limits: Mapping[float, int], rules: Mapping[str, Sequence[Rules]], most: int
) -> None:
    """Plans of each kind within each limit; what has one is left as it is."""
    for name, kinds in rules.items():
        for share, limit in limits.items():
            for kind, allowed in enumerate(kinds):
                place = {"way": name, "share": share, "kind": kind}
                if not bench.log.last("plan", **place) and not bench.log.last("none", **place):
                    bench.log.add("begin", way=name)
                    _make_plan(bench, planner, allowed, limit, most, place)


def _make_plan(bench: Bench, planner: Planner, rules: Rules, limit: int, most: int, place: dict[str, Any]) -> None:
    allowed = limit
    for _ in range(MOST_PLANS):
        bench.check_time()
        try:
            plan = planner.best(rules, allowed)
            if plan.batch_size > most:  # no other way may take more
                plan = planner.best(rules, allowed, batch=most)
        except DoesNotFit as error:
            bench.log.add("none", **place, why=f"does not fit: {str(error).splitlines()[0]}")
            return
        job = bench.job(plan.batch_size)
        attempt = bench.peak(plan.batch_size, lambda job=job, plan=plan: planned(job, plan))
        if attempt.peak_bytes <= limit:
            document, predicted = plan.to_dict(), plan.predicted.samples_per_second
            figures = {"batch": plan.batch_size, "predicted": predicted, "gap": plan.certificate.gap}
            bench.log.add("plan", **place, plan=plan.digest, document=document, **figures)
            return
        allowed -= attempt.peak_bytes - limit
    why = f"the plan held {attempt.peak_bytes} bytes, the limit is {limit}"
    bench.log.add("none", **place, why=why, peak_bytes=attempt.peak_bytes)


def plan_candidates(bench: Bench) -> list[Candidate]:
    """What the plans in the log ask for."""
    lines = bench.log.all("plan")
    return [Candidate(line["way"], line["batch"], BY_PLAN, {}, line["plan"]) for line in lines if "like" not in line]
