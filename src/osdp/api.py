"""`osdp.plan`: a model and a cluster in, the provably fastest plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from osdp.baselines import Way, baselines
from osdp.batching import CLOSE, LARGEST_MICRO_BATCH, Batching
from osdp.cluster import Cluster, parse_bytes
from osdp.cost.graph import step_graph
from osdp.cost.layout import Layout
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.errors import DoesNotFit, UsageError
from osdp.infeasible import Measured, nothing_fits
from osdp.model.graph import ModelGraph, TensorOperator
from osdp.planfile import PLAN_VERSION, Certificate, Plan, PlanModel, PlanUnit, Predicted
from osdp.recompute import AUTO, Recompute, read_recompute
from osdp.search.batches import Candidate, Found, Seed, judged, largest_batch, search_batches, smaller_batch
from osdp.search.problem import Problem
from osdp.search.solve import lowest_peak, relaxed_bound
from osdp.sharding import MODES, REPLICATE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from osdp.layouts import Tried
    from osdp.verify import Verification

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


def plan(
    model: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | None = None,
    *,
    memory: str | int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    reduce_dtype: str | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    pin: Mapping[str, str] | Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
    split: bool = True,
    recompute: bool | str = AUTO,
    compiled: bool = False,
    loss_chunks: int | str = 1,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
    seq_len: int | None = None,
    progress: Report | None = None,
    verify: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
    stage: int | None = None,
    layout: str | None = None,
    on_layout: Callable[[Tried], None] | None = None,
) -> Plan:
    """Finds the plan with the most samples per second that fits the memory, and proves it.

    `cluster` is one, a word such as 8xA100-80GB or a file; without it the ranks that run are planned for.
    `example_inputs` is a tuple, a dict, or a function of the batch size that returns both. `batch` fixes the
    micro-batch of a device, `accumulation` how many of them make a step, `global_batch` the samples of a step over all
    devices. `pin` holds units to modes by name pattern, `modes` restricts all. `recompute` is none, selective or full
    for every block, or auto for the best of each. With `compiled`, `osdp.parallelize` compiles every block, which is
    one unit then. With `loss_chunks`, the model computes its loss in so many chunks from now on; auto takes 8 where
    that is faster; see `osdp.losses.chunk_loss`. With `verify` the peak is that of a dry run: where it differs from
    the prediction, the search's limit is corrected and the model planned again. Raises `DoesNotFit` with the smallest
    peak and what would help. Where a process group runs, call it on every rank: rank 0 plans, all get its plan.

    With `tensor` ranks to every operator and `pipeline` stages, the plan is for the data-parallel dimension that is
    left of the cluster, of the `stage` that is asked for, or of the slowest; see [Note: Outer layout] in
    osdp.cost.outer.
    With `layout="auto"` both degrees are chosen; `on_layout` is told of each that was tried.
    """
    asked: dict[str, Any] = dict(locals())
    if loss_chunks == AUTO:
        from osdp.loss_choice import plan_either

        asked |= {"modes": modes and tuple(modes), "pin": read_pins(pin)}

        def with_chunks(model: nn.Module, chunks: int) -> Plan:
            changed: dict[str, Any] = {"model": model, "loss_chunks": chunks}
            return plan(**(asked | changed))

        return plan_either(model, with_chunks)
    if not isinstance(loss_chunks, int):
        raise UsageError(f"loss_chunks is {loss_chunks!r}, but must be a whole number or auto")
    from osdp.model.capture import capture
    from osdp.runtime.consistency import by_rank_0

    training = Training.of(precision, optimizer, reduce_dtype, compiled=compiled, loss_chunks=loss_chunks)
    report = progress or (lambda _: None)
    rules = Rules(modes=tuple(modes or MODES), split=split, pins=read_pins(pin) or None)
    rules = replace(rules, recompute=read_recompute(recompute))
    if loss_chunks > 1:
        from osdp.losses import chunk_loss

        chunk_loss(model, loss_chunks)
    if compiled:
        rules = replace(rules, granularities=(WHOLE,))
    devices = resolve(cluster, memory)
    batching = Batching(batch, accumulation, global_batch)

    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UsageError(
            "the model's parameters are DTensors, which cannot be traced; plan the plain model, with tensor= as many"
            " ranks as share it, and divide it before osdp.parallelize"
        )
    larger = tensor * pipeline > 1 or stage is not None or layout is not None
    if larger and verify:
        raise UsageError("a dry run has no tensor or pipeline dimension; leave verify out, or plan without them")
    if layout not in (None, "auto") or min(tensor, pipeline) < 1 or (layout and tensor * pipeline > 1):
        raise UsageError(
            f"layout {layout!r}, tensor {tensor} and pipeline {pipeline} do not go together; give degrees of at least"
            " 1, or layout 'auto' alone"
        )

    def divided(ranks: int) -> tuple[ModelGraph, tuple[TensorOperator, ...]]:
        if ranks == 1:
            return traced(model), ()
        from osdp.model.tensor_parallel import divide, on_meta

        local = on_meta(model)
        shared = divide(local, ranks)
        return traced(local), shared

    def traced(model: nn.Module) -> ModelGraph:
        report(Progress("capture", 0, 0, 1, 0.0))
        return capture(
            model,
            example_inputs,
            loss=loss,
            name=name,
            compute_dtype=training.precision.compute_dtype,
            seq_len=seq_len,
            batch=batch,
            device=devices.device,
        )

    def make() -> Plan:
        if larger:
            from osdp.layouts import Asked, plan_inside, plan_layouts

            asked = Asked(divided, devices, training, rules, batching, report)
            if layout is None:
                return plan_inside(asked, tensor, pipeline, stage)
            return plan_layouts(asked, tried=on_layout or (lambda _: None))
        graph = traced(model)

        def search(cluster: Cluster) -> Plan:
            samples = {"batch": batch, "accumulation": accumulation, "global_batch": global_batch}
            return plan_graph(graph, cluster, training, rules, progress=report, **samples)

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
            return nothing_fits(graph, devices, training, rules, batching, measured=least)

        return plan_verified(devices, search, check, misfit)

    return by_rank_0(make)


def resolve(cluster: Cluster | str | None, memory: str | int | None) -> Cluster:
    if cluster is None:
        from osdp.runtime.here import this_cluster

        return this_cluster(memory_bytes=None if memory is None else parse_bytes(memory))
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
    accumulation: int | None = None,
    global_batch: int | None = None,
    progress: Report | None = None,
    search_seconds: float = SEARCH_SECONDS,
) -> Plan:
    """Plans a captured model: the search, its proof, and the baselines beside it."""
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
    if found is None:
        raise nothing_fits(graph, cluster, training, rules, batching)
    taken = _preferred(found, seeds, batching, search_seconds)
    layout, options = space.read(taken)
    predicted = _predicted(layout, options, taken, space.training(taken.candidate.accumulation), cluster)
    _check_against(predicted, seeds, cluster)
    return Plan(
        version=PLAN_VERSION,
        model=_plan_model(graph, layout),
        cluster=cluster,
        precision=training.precision.name,
        reduce_dtype=training.reduce_dtype,
        optimizer=training.optimizer.name,
        batch_size=taken.batch,
        accumulation=taken.candidate.accumulation,
        predicted=predicted,
        certificate=_certificate(found, cluster, space.num_options),
        baselines=tuple(way.baseline for way in ways),
        units=plan_units(layout, options),
        compiled=training.compiled,
        loss_chunks=training.loss_chunks,
    )


class _Space:
    """All that may be chosen for a model on a cluster: problems by accumulation, batch size and variant."""

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
        """One family of problems for each variant; without a given batch size, up to the largest that may fit."""
        tables, limit = self.tables(accumulation), self._cluster.limit_bytes
        for recomputed in tables.variants:

            @lru_cache(maxsize=_PROBLEMS)
            def make(batch: int, time_batch: int, recomputed: bool | None = recomputed) -> Problem:
                variant = {"accumulation": accumulation, "recomputed": recomputed}
                return tables.problem(batch, limit=limit, time_batch=time_batch, **variant)

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

    def read(self, found: Found) -> tuple[Layout, list[Option]]:
        problem = found.candidate.make(found.batch, found.batch)
        return self.tables(found.candidate.accumulation).read(problem, found.choice)


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


def _predicted(layout: Layout, options: list[Option], found: Found, training: Training, cluster: Cluster) -> Predicted:
    graph = step_graph(layout, options, found.batch, training, cluster)
    timeline, time = graph.timeline(), graph.time()
    return Predicted(
        step_seconds=time.total,
        samples_per_second=found.batch * found.candidate.accumulation * cluster.world_size / time.total,
        mfu=layout.graph.flops_at(found.batch)
        * found.candidate.accumulation
        / (time.total * cluster.device.peak_flops[training.precision.compute_dtype]),
        peak_bytes=timeline.peak_bytes,
        limit_bytes=cluster.limit_bytes,
        reserve_bytes=sum(cluster.reserve.values()),
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


def _certificate(found: Found, cluster: Cluster, options: int) -> Certificate:
    bound = cluster.world_size / found.bound
    rate = cluster.world_size / found.seconds_per_sample
    return Certificate(
        status=found.status,
        bound=bound,
        gap=max(0.0, 1 - rate / bound),
        fastest_samples_per_second=rate,
        fastest_batch_size=found.batch,
        nodes=found.nodes,
        seconds=found.seconds,
        batches_searched=found.solved,
        options=options,
    )


def _plan_model(graph: ModelGraph, layout: Layout) -> PlanModel:
    return PlanModel(
        name=graph.name,
        parameters=graph.num_parameters,
        seq_len=graph.seq_len,
        uncalled=uncalled_parameters(graph, layout),
        trained=sum(each.numel for each in graph.parameters.values() if each.trainable),
        sample_elements=graph.sample_elements,
        assumptions=graph.assumptions,
        unused=graph.unused,
    )


def uncalled_parameters(graph: ModelGraph, layout: Layout) -> dict[str, int]:
    """The parameters that are in no unit, because no call reaches them; see `PlanModel`."""
    held = {parameter.name for unit in layout.units for parameter in unit.parameters}
    return {name: parameter.numel for name, parameter in graph.parameters.items() if name not in held}


def plan_units(layout: Layout, options: list[Option]) -> tuple[PlanUnit, ...]:
    """The plan's units, in the order in which forward enters them."""
    recomputed = {shaped.stage.name: shaped.shape.recompute for shaped in layout.shaped if shaped.stage.is_block}
    granularity = {shaped.stage.name: shaped.shape.granularity for shaped in layout.shaped if shaped.stage.is_block}
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
            recompute=Recompute.NONE if unit.block is None else recomputed[unit.block],
            reduce_once=option.reduce_once,
            two_levels=option.two_levels,
            parameters=unit.numel,
            all_reduce_once=option.all_reduce_once,
            granularity=granularity.get(unit.block or "", OPERATORS),
        )
        for unit, option, _ in rows
    )


__all__ = ["Progress", "plan", "plan_graph", "plan_units", "read_pins", "resolve"]
