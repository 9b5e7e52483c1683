"""Everything that the HTML report shows, computed from a plan and its model: values, no drawing.

A plan file has the plan's figures and those of the baselines; what happens within a step is computed again
from the model, by the same cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from osdp.baselines import WAYS, Prices
from osdp.batching import largest_that_fits
from osdp.cluster import format_bytes
from osdp.cost.graph import StepGraph, step_graph_of, training_of
from osdp.cost.lifetimes import unit_allocations
from osdp.cost.option_seconds import Kernels
from osdp.cost.positions import END, START, Allocation
from osdp.cost.step_trace import step_trace
from osdp.cost.tables import Uniform
from osdp.cost.time_model import compute_time, unit_work
from osdp.model.graph import ModelGraph
from osdp.planfile import Certificate, Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.report.measurements import Measurement
from osdp.report.numbers import format_rate
from osdp.report.page import PlanPage, plan_page, way_name
from osdp.report.step_picture import StepPicture, step_picture

THE_PLAN = "this plan"
POINTS = 14  # batch sizes of a rate curve, at equal ratios


@dataclass(frozen=True)
class RatePoint:
    batch_size: int
    samples_per_second: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class RateCurve:
    """Throughput by batch size of one way; `largest` is the largest batch size that fits, 0 where none does."""

    name: str
    points: tuple[RatePoint, ...]
    largest: int


@dataclass(frozen=True)
class UnitBox:
    """A unit as the strip of the model shows it; seconds are of one micro-batch.

    `held_bytes` are there all the time, `own_peak_bytes` is the most that the unit holds at any moment. `stall_seconds`
    is what computation waits for this unit's collectives.
    """

    unit: PlanUnit
    held_bytes: int
    own_peak_bytes: int
    compute_seconds: float
    gather_seconds: float
    reduce_seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class StageBox:
    """A block, or what runs between blocks, with its units."""

    name: str
    is_block: bool
    recompute: Recompute
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    units: tuple[UnitBox, ...]


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured, in bytes or seconds."""

    what: str
    predicted: float
    measured: float
    source: str

    @property
    def error(self) -> float:
        """How far the prediction is from the measurement, as a share of it."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class ReportPage:
    plan: PlanPage
    limit_bytes: int
    ways: tuple[StepPicture, ...]  # the plan first
    rates: tuple[RateCurve, ...]
    stages: tuple[StageBox, ...]
    comparisons: tuple[Comparison, ...]
    proof: str


def report_page(plan: Plan, graph: ModelGraph, measurements: Sequence[Measurement] = ()) -> ReportPage:
    """`graph` is the captured model of the plan."""
    step = step_graph_of(plan, graph)
    ways = [Way(THE_PLAN, step, partial(_priced, step)), *_usual_ways(plan, graph)]
    return ReportPage(
        plan=plan_page(plan),
        limit_bytes=plan.predicted.limit_bytes,
        ways=tuple(step_picture(way.name, way.step) for way in ways),
        rates=rate_curves(ways, only=graph.only_batch),
        stages=stage_boxes(plan, step),
        comparisons=tuple(comparisons(plan, measurements)),
        proof=proof_sentence(plan.certificate, plan),
    )


@dataclass(frozen=True)
class Way:
    """A way to train: its step, and the seconds of a step and the peak that its choices have at other batch sizes."""

    name: str
    step: StepGraph
    price: Callable[[int], tuple[float, int]]


def _priced(step: StepGraph, batch: int) -> tuple[float, int]:
    other = replace(step, batch=batch)  # its nodes are still those of the other batch, and not used
    return other.seconds, other.timeline().peak_bytes


def _usual_ways(plan: Plan, graph: ModelGraph) -> Iterator[Way]:
    """Those that the plan was compared with; of one that does not fit, the step with a single sample a micro-batch."""
    training = replace(training_of(plan), accumulation=1)
    prices, modes = Prices(graph, plan.cluster, training), dict(WAYS)
    for way in plan.baselines:
        if way.name not in modes:
            continue
        batch, micro = (way.batch_size, way.accumulation) if way.feasible else (graph.only_batch or 1, 1)
        # a plan file does not say whether gradients were reduced once: the seconds tell
        uniform = min(
            (Uniform(modes[way.name], way.recompute, once) for once in ((False, True) if micro > 1 else (False,))),
            key=lambda each: abs(prices.verdict(each, batch, micro).seconds - way.step_seconds),
        )

        def price(size: int, uniform: Uniform = uniform, micro: int = micro) -> tuple[float, int]:
            verdict = prices.verdict(uniform, size, micro)
            return verdict.seconds, verdict.peak

        yield Way(way_name(way.name, way.recompute), prices.step(uniform, batch, micro), price)


def rate_curves(ways: Sequence[Way], *, only: int | None = None) -> tuple[RateCurve, ...]:
    """Every way's choices at other batch sizes, up to a little more than the largest that fits in any of them."""
    largest = {way.name: _largest(way, only) for way in ways}
    last = max(2, round(1.25 * max(largest.values())))
    sizes = {only} if only else {round(last ** (n / POINTS)) for n in range(POINTS + 1)}
    curves = []
    for way in ways:
        wanted = sorted({*sizes, *({largest[way.name]} - {0}), way.step.batch})
        curves.append(RateCurve(way.name, tuple(_point(way, size) for size in wanted), largest[way.name]))
    return tuple(curves)


def _point(way: Way, batch: int) -> RatePoint:
    seconds, peak = way.price(batch)
    cluster = way.step.cluster
    samples = batch * way.step.training.accumulation * cluster.world_size
    return RatePoint(batch, samples / seconds, peak, peak <= cluster.limit_bytes)


def _largest(way: Way, only: int | None) -> int:
    """The largest batch size that fits; 0 where none does."""

    def fits(batch: int) -> bool:
        return way.price(batch)[1] <= way.step.cluster.limit_bytes

    if only is not None:
        return only if fits(only) else 0
    return largest_that_fits(fits)


def stage_boxes(plan: Plan, step: StepGraph) -> tuple[StageBox, ...]:
    layout, batch = step.layout, step.batch
    planned = {unit.name: unit for unit in plan.units}
    stalls = step_trace(step).stall_seconds
    boxes, place = [], 0
    for staged in layout.staged:
        forward, backward = (
            compute_time(staged.trace, step.cluster, step.training, backward=back) for back in (False, True)
        )
        units = []
        for unit in staged.units:
            kernels = Kernels.of(layout.places[place], forward, backward, batch, batch)
            units.append(_unit_box(planned[unit.name], step, place, sum(kernels), stalls.get(unit.name, 0.0)))
            place += 1
        boxes.append(
            StageBox(
                name=staged.stage.name,
                is_block=staged.stage.is_block,
                recompute=staged.variant.recompute,
                saved_bytes=staged.trace.forward_delta.at(batch),
                forward_seconds=forward.at(batch),
                backward_seconds=backward.at(batch),
                units=tuple(units),
            )
        )
    return tuple(boxes)


def _unit_box(planned: PlanUnit, step: StepGraph, place: int, kernels: float, stalls: float) -> UnitBox:
    unit, option, places = step.layout.units[place], step.options[place], step.layout.places[place]
    allocations = unit_allocations(unit, option, places, step.training, step.cluster)
    work = unit_work(unit, option, places, step.training, step.cluster)
    return UnitBox(
        unit=planned,
        held_bytes=sum(hold.nbytes for hold in allocations if (hold.start, hold.end) == (START, END)),
        own_peak_bytes=_most(allocations),
        compute_seconds=kernels,
        gather_seconds=sum(each.seconds for each in (*work.gather, *work.gather_again)),
        reduce_seconds=sum(each.seconds for each in work.reduce),
        stall_seconds=stalls,
    )


def _most(allocations: Sequence[Allocation]) -> int:
    """The most bytes that are alive at once."""
    changes = [(hold.start, hold.nbytes) for hold in allocations] + [(hold.end, -hold.nbytes) for hold in allocations]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def comparisons(plan: Plan, measurements: Sequence[Measurement]) -> Iterator[Comparison]:
    for each in measurements:
        if each.step_seconds:
            yield Comparison("step", plan.predicted.step_seconds, each.step_seconds, each.source)
        if each.peak_bytes:
            yield Comparison("peak memory", plan.predicted.peak_bytes, each.peak_bytes, each.source)


def proof_sentence(proof: Certificate, plan: Plan) -> str:
    """What is known about plans that would be faster, in a sentence."""
    if proof.status == "none":
        return "This plan was not searched for, so nothing is proven about it."
    rate, bound = format_rate(plan.predicted.samples_per_second), format_rate(proof.bound)
    sizes = "one batch size" if proof.batches_searched == 1 else f"{proof.batches_searched or 'no'} batch sizes"
    space = f"{proof.options:,} options of its units and {sizes}"
    within = f"within {format_bytes(plan.predicted.limit_bytes)} on each device"
    if plan.buckets:
        units = sum(map(len, plan.buckets.values()))
        return (
            f"No plan of the searched space, in which every unit is reduced by itself, is faster than {bound} samples/s"
            f" {within} ({proof.status}, over {space}, in {proof.seconds:.1f} s). This one reaches {rate}: it reduces"
            f" {units} units in {plan.all_reduces}, which is a rule and not part of the proof."
        )
    left = max(0.0, 1 - plan.predicted.samples_per_second / proof.bound)
    if proof.status == "optimal":
        return (
            f"No plan of the searched space is faster than {bound} samples/s {within}: a mixed-integer program over "
            f"{space} was solved to optimality in {proof.seconds:.1f} s, and this plan reaches {rate}."
        )
    return (
        f"No plan of the searched space is faster than {bound} samples/s {within}; this plan reaches {rate}, so at "
        f"most {100 * left:.2f} % is left. The search over {space} ended after {proof.seconds:.1f} s ({proof.status})."
    )
