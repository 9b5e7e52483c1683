"""Planning of a captured model: its baselines, the search over them, the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from osdp.answer import certificate_of, plan_model, plan_units, predicted_of
from osdp.baselines import Way, baselines
from osdp.batching import CLOSE, LARGEST_MICRO_BATCH, Batching
from osdp.cluster import Cluster
from osdp.cost.buckets import can_join
from osdp.cost.graph import StepGraph, fastest_joined, step_graph
from osdp.cost.offload import may_step_on_host
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.infeasible import nothing_fits
from osdp.model.graph import ModelGraph
from osdp.planfile import PLAN_VERSION, Plan, Predicted
from osdp.search.batches import Candidate, Found, Seed, judged, largest_batch, search_batches, smaller_batch
from osdp.search.problem import Problem
from osdp.search.solve import lowest_peak, relaxed_bound

_PROBLEMS = 16  # of each family that are kept: most are asked for several times
SEARCH_SECONDS = 20.0  # what is not proven by then is said in the certificate


@dataclass(frozen=True)
class Progress:
    """Where planning is: `stage` is capture, search, baselines or dry run; `done` of `total` is as far as is known."""

    stage: str
    batch: int
    done: int
    total: int
    best_samples_per_second: float


Report = Callable[[Progress], None]


def plan_graph(
    graph: ModelGraph,
    cluster: Cluster,
    training: Training,
    rules: Rules,
    *,
    batch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    progress: Report | None = None,
    search_seconds: float = SEARCH_SECONDS,
    else_on_host: bool = False,
    host_graph: Callable[[], ModelGraph] | None = None,
    join: bool = True,
) -> Plan:
    """Plans a captured model: the search, its proof, and the baselines beside it.

    With `else_on_host`, units may be held on the host where nothing fits without that, and inputs of blocks that
    `host_graph` has traces of: the same model captured once more, then only. With `join`, reductions of its answer may
    be joined; see [Note: Rule of joining] in osdp.cost.buckets.
    """
    given = batch is not None or global_batch is not None
    batching = Batching(batch if given else graph.only_batch, accumulation, global_batch)
    report = progress or (lambda _: None)
    report(Progress("baselines", 0, 0, 1, 0.0))
    ways = baselines(graph, cluster, training, batching)
    report(Progress("search", 0, 0, 1, 0.0))
    graph.check_batches(size for _, size in batching.ways(cluster.world_size) if size)
    space = _Space(graph, cluster, training, rules, batching)

    def shown(size: int, done: int, waiting: int, each: float) -> None:
        rate = cluster.world_size / each if each > 0 else 0.0
        report(Progress("search", size, done, done + waiting, rate))

    seeds = [seed for way in ways if way.baseline.feasible for seed in space.seeds(way)]
    found = search_batches(space.candidates, seconds=search_seconds, seeds=seeds, progress=shown)
    found = found or space.smallest()
    if found is None and else_on_host and cluster.can_offload and may_step_on_host(training):
        more = {"batch": batch, "accumulation": accumulation, "global_batch": global_batch}
        rules = replace(rules, offload=True)
        graph = graph if host_graph is None else host_graph()
        return plan_graph(graph, cluster, training, rules, progress=progress, search_seconds=search_seconds, **more)
    if found is None:
        raise nothing_fits(graph, cluster, training, rules, batching)
    taken = _preferred(found, seeds, batching, search_seconds)
    step = space.step(taken)
    if join and can_join(training, cluster):
        taken, step = _joined(space, taken, seeds, cluster)
    predicted = predicted_of(step)
    _check_against(predicted, seeds, cluster)
    return Plan(
        version=PLAN_VERSION,
        model=plan_model(graph, step.layout),
        cluster=cluster,
        precision=training.precision.name,
        reduce_dtype=training.reduce_dtype,
        optimizer=training.optimizer.name,
        batch_size=taken.batch,
        accumulation=taken.candidate.accumulation,
        predicted=predicted,
        certificate=certificate_of(found, cluster, space.num_options),
        baselines=tuple(way.baseline for way in ways),
        units=plan_units(step.layout, step.options),
        compiled=training.compiled,
        loss_chunks=training.loss_chunks,
    )


class _Space:
    """All that may be chosen for a model on a cluster: problems by accumulation, batch size and case of recompute."""

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules, batching: Batching
    ) -> None:
        self._graph, self._cluster, self._training, self._rules = graph, cluster, training, rules
        self._tables: dict[bool, Tables] = {}
        self.candidates = [
            candidate
            for accumulation, batch in batching.ways(cluster.world_size)
            for candidate in self._candidates(accumulation, batch)
        ]

    def training(self, accumulation: int) -> Training:
        return replace(self._training, accumulation=accumulation)

    def tables(self, accumulation: int) -> Tables:
        """Micro-batches that are accumulated cost the same however many they are."""
        often = accumulation > 1
        if often not in self._tables:
            self._tables[often] = Tables(self._graph, self._cluster, self.training(accumulation), self._rules)
        return self._tables[often]

    @property
    def num_options(self) -> int:
        return max(tables.num_options for tables in self._tables.values())

    def _candidates(self, accumulation: int, batch: int | None) -> Iterator[Candidate]:
        """A family of problems for each case of recompute; without a given batch, up to the largest that may fit."""
        tables, limit = self.tables(accumulation), self._cluster.limit_bytes
        for recomputed in tables.recompute_cases:

            @lru_cache(maxsize=_PROBLEMS)
            def make(batch: int, time_batch: int, recomputed: bool | None = recomputed) -> Problem:
                fixed = {"accumulation": accumulation, "recomputed": recomputed}
                return tables.problem(batch, limit=limit, time_batch=time_batch, **fixed)

            low, high = (batch, batch) if batch else (1, largest_batch(make, most=LARGEST_MICRO_BATCH))
            if high:
                yield Candidate(recomputed, make, accumulation, low, high)

    def seeds(self, way: Way) -> Iterator[Seed]:
        """A baseline as a choice of this space, if the rules allow it."""
        for candidate in self.candidates:
            size, micro = way.baseline.batch_size, way.baseline.accumulation
            inside = candidate.low <= size <= candidate.high and candidate.accumulation == micro
            if inside and candidate.key in (None, bool(way.uniform.recompute)):
                problem = candidate.make(size, size)
                choice = self.tables(micro).uniform(problem, way.uniform)
                if choice is not None:
                    yield candidate, size, choice

    def smallest(self) -> Found | None:
        """A plan that needs as little memory as any, should the search have missed that it fits."""
        for candidate in self.candidates:
            choice, _ = lowest_peak(candidate.make(candidate.low, candidate.low))
            found = judged(candidate, candidate.low, choice)
            if found is not None:
                problem = candidate.make(candidate.low, candidate.high)
                bound = relaxed_bound(problem) / (candidate.high * candidate.accumulation)
                return replace(found, status="time limit", bound=min(bound, found.seconds_per_sample))
        return None

    def step(self, found: Found) -> StepGraph:
        problem, micro = found.candidate.make(found.batch, found.batch), found.candidate.accumulation
        layout, options = self.tables(micro).read(problem, found.choice)
        return step_graph(layout, options, found.batch, self.training(micro), self._cluster)


def _preferred(found: Found, seeds: Sequence[Seed], batching: Batching, search_seconds: float) -> Found:
    """The plan with the smallest micro-batch that is within CLOSE of the fastest, and no slower than a baseline."""
    if batching.batch is not None or batching.global_batch is not None:
        return found
    usual = [each.seconds_per_sample for seed in seeds if (each := judged(*seed)) is not None]
    return smaller_batch(found, min([found.seconds_per_sample / (1 - CLOSE), *usual]), seconds=search_seconds / 4)


def _check_against(predicted: Predicted, seeds: Sequence[Seed], cluster: Cluster) -> None:
    """No plan is slower than a baseline that is in its space: it would be a fault of the search."""
    for seed in seeds:
        usual = judged(*seed)
        if usual is None:
            continue
        rate = cluster.world_size / usual.seconds_per_sample
        if predicted.samples_per_second < rate * (1 - 1e-6):
            raise RuntimeError(
                f"the search returned a plan of {predicted.samples_per_second:.6g} samples/s, a baseline "
                f"reaches {rate:.6g}: this is a fault of osdp, please report it with the command"
            )


def _joined(space: _Space, taken: Found, seeds: Sequence[Seed], cluster: Cluster) -> tuple[Found, StepGraph]:
    """The answer with its reductions joined, or a plain way of its space that is faster so."""
    found = [taken, *(each for seed in seeds if (each := judged(*seed)) is not None)]
    steps = [fastest_joined(space.step(each), cluster.limit_bytes) for each in found]
    seconds = [step.seconds / (step.batch * step.training.accumulation) for step in steps]
    best = min(range(len(found)), key=seconds.__getitem__)
    return found[best], steps[best]
