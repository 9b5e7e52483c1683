"""`osdp.plan`: a model and a cluster in, the provably fastest plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from osdp.baselines import baselines
from osdp.cluster import Cluster, parse_bytes
from osdp.cost.graph import step_graph
from osdp.cost.layout import Layout
from osdp.cost.tables import Grain, Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.errors import DoesNotFit, UsageError
from osdp.fit import Measured, nothing_fits
from osdp.model.graph import ModelGraph
from osdp.planfile import (
    MODES,
    PLAN_VERSION,
    REPLICATE,
    Certificate,
    Plan,
    PlanModel,
    PlanUnit,
    Predicted,
)
from osdp.search.batches import Candidate, Found, largest_batch, search_batches
from osdp.search.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from osdp.verify import Verification

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


def plan(
    model: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str,
    *,
    memory: str | int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    reduce_dtype: str | None = None,
    batch: int | None = None,
    global_batch: int | None = None,
    pin: Mapping[str, str] | Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
    split: bool = True,
    recompute: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
    seq_len: int | None = None,
    progress: Report | None = None,
    verify: bool = False,
) -> Plan:
    """Finds the plan with the most samples per second that fits the memory, and proves it.

    `example_inputs` is a tuple, a dict, or a function of the batch size that returns both. `batch` fixes the
    micro-batch of a device, `global_batch` the samples of a step over all of them. `pin` holds units to modes by name
    pattern, `modes` restricts all. With `verify` the peak is that of a dry run: where it differs from the prediction,
    the search's limit is corrected and the model planned again. Raises `DoesNotFit` with the smallest peak and what
    would help. Where a process group runs, call it on every rank: rank 0 plans, all get its plan.
    """
    from osdp.model.capture import capture
    from osdp.runtime.agree import by_rank_0

    training = Training.of(precision, optimizer, reduce_dtype)
    report = progress or (lambda _: None)
    rules = Rules(modes=tuple(modes or MODES), split=split, recompute=recompute, pins=read_pins(pin) or None)
    devices = resolve(cluster, memory)

    def make() -> Plan:
        report(Progress("capture", 0, 0, 1, 0.0))
        graph = capture(
            model, example_inputs, loss=loss, name=name, compute_dtype=training.precision.compute_dtype, seq_len=seq_len
        )

        def search(cluster: Cluster) -> Plan:
            return plan_graph(graph, cluster, training, rules, batch=batch, global_batch=global_batch, progress=report)

        if not verify:
            return search(devices)
        from osdp.model.capture import scaled_inputs
        from osdp.verify import plan_verified
        from osdp.verify import verify as dry_run

        inputs = example_inputs if callable(example_inputs) else scaled_inputs(example_inputs)

        def check(plan: Plan) -> Verification:
            report(Progress("dry run", plan.batch_size, 0, 1, plan.predicted.samples_per_second))
            return dry_run(plan, graph, build=lambda: model, inputs=inputs, loss=loss)

        def misfit(truth: Verification) -> DoesNotFit:
            unseen = truth.measured_peak_bytes - truth.predicted_peak_bytes
            least = Measured(truth.measured_peak_bytes, truth.measured_at, truth.measured_parts, unseen)
            return nothing_fits(graph, devices, training, rules, batch or 1, global_batch=global_batch, measured=least)

        return plan_verified(devices, search, check, misfit)

    return by_rank_0(make)


def resolve(cluster: Cluster | str, memory: str | int | None) -> Cluster:
    found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    return found if memory is None else replace(found, memory_bytes=parse_bytes(memory))


def read_pins(pin: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    """Pins as a mapping; each text is 'name pattern=mode'."""
    if pin is None or isinstance(pin, Mapping):
        return dict(pin or {})
    pins: dict[str, str] = {}
    for text in pin:
        pattern, equals, mode = text.partition("=")
        if not equals or not pattern or mode not in MODES:
            raise UsageError(f"pin {text!r} is not 'name=mode'; the modes are {', '.join(MODES)}")
        if pins.get(pattern, mode) != mode:
            raise UsageError(f"{pattern!r} is pinned to both {pins[pattern]} and {mode}; keep one")
        pins[pattern] = mode
    return pins


def plan_graph(
    graph: ModelGraph,
    cluster: Cluster,
    training: Training,
    rules: Rules,
    *,
    batch: int | None = None,
    global_batch: int | None = None,
    progress: Report | None = None,
    search_seconds: float = SEARCH_SECONDS,
) -> Plan:
    """Plans a captured model: the search, its proof, and the baselines beside it."""
    report = progress or (lambda _: None)
    report(Progress("search", 0, 0, 1, 0.0))
    micro = _micro(batch, global_batch, cluster)
    tables = {a: Tables(graph, cluster, replace(training, accumulation=a), rules) for a in micro}
    candidates = [c for a, sizes in micro.items() for c in _candidates(tables[a], cluster, sizes)]

    def shown(size: int, done: int, waiting: int, each: float) -> None:
        rate = cluster.world_size / each if each > 0 else 0.0
        report(Progress("search", size, done, done + waiting, rate))

    found = search_batches(candidates, seconds=search_seconds, progress=shown) if candidates else None
    if found is None:
        raise nothing_fits(graph, cluster, training, rules, batch or 1, global_batch=global_batch)
    report(Progress("baselines", found.batch, 0, 1, cluster.world_size / found.seconds_per_sample))
    chosen = tables[found.candidate.accumulation]
    problem = found.candidate.make(found.batch, found.batch)
    layout, options = chosen.read(problem, found.choice)
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel(graph.name, graph.num_parameters, graph.seq_len),
        cluster=cluster,
        precision=training.precision.name,
        reduce_dtype=training.reduce_dtype,
        optimizer=training.optimizer.name,
        batch_size=found.batch,
        accumulation=found.candidate.accumulation,
        predicted=_predicted(layout, options, found, chosen),
        certificate=_certificate(found, cluster, chosen),
        baselines=baselines(graph, cluster, training, batch=batch, global_batch=global_batch),
        units=plan_units(layout, options),
    )


def _micro(batch: int | None, global_batch: int | None, cluster: Cluster) -> dict[int, tuple[int, int] | None]:
    """Accumulations, each with the interval of micro-batches to look at; None where memory bounds it."""
    for what, value in (("batch", batch), ("global batch", global_batch)):
        if value is not None and value < 1:
            raise UsageError(f"the {what} is {value} but must be at least 1")
    if batch is not None and global_batch is not None:
        raise UsageError("give a batch or a global batch, not both: one follows from the other")
    if batch is not None:
        return {1: (batch, batch)}
    if global_batch is None:
        return {1: None}
    each, rest = divmod(global_batch, cluster.world_size)
    if rest:
        raise UsageError(
            f"a global batch of {global_batch} does not divide over {cluster.world_size} devices; "
            f"{max(each, 1) * cluster.world_size} does"
        )
    return {a: (each // a, each // a) for a in range(1, each + 1) if each % a == 0}


def _candidates(tables: Tables, cluster: Cluster, sizes: tuple[int, int] | None) -> Iterator[Candidate]:
    """One family of problems for each grain; without given sizes, up to the largest batch that may fit."""
    for grain in tables.grains():

        def make(batch: int, time_batch: int, grain: Grain = grain) -> Problem:
            return tables.problem(batch, limit=cluster.limit_bytes, grain=grain, time_batch=time_batch)

        low, high = sizes or (1, largest_batch(make))
        if high:
            yield Candidate(grain, make, tables.training.accumulation, low, high)


def _predicted(layout: Layout, options: list[Option], found: Found, tables: Tables) -> Predicted:
    graph = step_graph(layout, options, found.batch, tables.training, tables.cluster)
    timeline, time = graph.timeline(), graph.time()
    cluster = tables.cluster
    memory = cluster.device.memory_bytes if cluster.memory_bytes is None else cluster.memory_bytes
    return Predicted(
        step_seconds=time.total,
        expected_seconds=graph.simulated_seconds(),
        samples_per_second=found.batch * found.candidate.accumulation * cluster.world_size / time.total,
        peak_bytes=timeline.peak_bytes,
        limit_bytes=cluster.limit_bytes,
        reserve_bytes=memory - cluster.limit_bytes,
        peak_at=str(timeline.peak),
        memory_parts=timeline.peak.parts,
        time_parts={
            "compute": time.compute,
            "copies": time.copies,
            "exposed communication": time.exposed_communication,
            "optimizer": time.optimizer,
            "hidden communication": time.hidden_communication,
        },
    )


def _certificate(found: Found, cluster: Cluster, tables: Tables) -> Certificate:
    bound = cluster.world_size / found.bound
    rate = cluster.world_size / found.seconds_per_sample
    return Certificate(
        status=found.status,
        bound=bound,
        gap=max(0.0, (bound - rate) / bound),
        nodes=found.nodes,
        seconds=found.seconds,
        batches_searched=found.solved,
        options=tables.num_options,
    )


def plan_units(layout: Layout, options: list[Option]) -> tuple[PlanUnit, ...]:
    """The plan's units, in the order in which forward enters them."""
    recomputed = {shaped.stage.name for shaped in layout.shaped if shaped.shape.recompute}
    rows = sorted(
        zip(layout.units, options, layout.places, strict=True),
        key=lambda row: (row[2].enter is None, row[2].enter or 0),
    )
    return tuple(
        PlanUnit(
            name=unit.name,
            modules=unit.modules,
            block=unit.block,
            mode=option.mode,
            splits=option.slices,
            sharded_splits=0 if option.mode == REPLICATE else option.sharded,
            recompute=unit.block in recomputed,
            reduce_once=option.reduce_once,
            two_levels=option.two_levels,
            parameters=unit.numel,
        )
        for unit, option, _ in rows
    )


__all__ = ["Progress", "plan", "plan_graph", "plan_units", "read_pins", "resolve"]
