"""The page about a plan, and the page about none: their values, without a word of layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from osdp.cluster import KERNELS, format_bytes
from osdp.cluster.device import CALIBRATED, DATA_SHEET, MEASURED
from osdp.cluster.reserve import FRAGMENTS, RESERVED
from osdp.errors import DoesNotFit
from osdp.planfile import NO_LAYOUT, Baseline, Certificate, OuterLayout, Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.report.grouping import below, label_of, merged
from osdp.report.numbers import format_count
from osdp.sharding import MODES, REPLICATE


@dataclass(frozen=True)
class Part:
    """A named part of a whole, in bytes or seconds."""

    name: str
    amount: float
    share: float


@dataclass(frozen=True)
class UnitRow:
    """One unit of a group; `name` is as seen from its block, '' for what the block holds itself."""

    name: str
    mode: str
    splits: int
    sharded_splits: int
    reduce_once: bool
    two_levels: bool
    parameters: int
    all_reduce_once: bool = False
    gather_once: bool = False
    prefetch: int = 1
    offload: bool = False


@dataclass(frozen=True)
class Group:
    """Blocks, or a unit outside blocks, with the same choices; `parameters` are those of one of them."""

    names: tuple[str, ...]
    is_block: bool
    recompute: Recompute
    units: tuple[UnitRow, ...]

    @property
    def label(self) -> str:
        return label_of(self.names)

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)


@dataclass(frozen=True)
class BaselineRow:
    """A familiar way to train beside the plan; `ratio` is plan ÷ baseline, None where the baseline does not fit."""

    name: str
    recompute: Recompute
    batch_size: int
    accumulation: int
    samples_per_second: float
    peak_bytes: int
    ratio: float | None


@dataclass(frozen=True)
class Memory:
    """The peak of one device against its limit; `reserve` is what the limit leaves out, by what takes it."""

    peak_bytes: int
    limit_bytes: int
    at: str
    parts: tuple[Part, ...]
    reserve: tuple[Part, ...] = ()
    idle_pool_bytes: int = 0

    @property
    def share(self) -> float:
        return self.peak_bytes / self.limit_bytes


@dataclass(frozen=True)
class HostMemory:
    """What is taken of one node's host: memory, the part of the parameters there, and the blocks whose input is."""

    peak_bytes: int
    limit_bytes: int
    total_bytes: int
    parameter_share: float
    is_assumed: bool  # the host is what the catalogue takes a usual machine to have
    blocks: int = 0

    @property
    def share(self) -> float:
        return self.peak_bytes / self.limit_bytes


@dataclass(frozen=True)
class PlanPage:
    """Everything that the page about a plan shows."""

    model: str
    parameters: int
    seq_len: int | None
    cluster: str
    world_size: int
    precision: str
    reduce_dtype: str
    optimizer: str
    compiled: bool
    loss_chunks: int
    samples_per_second: float
    tokens_per_second: float | None
    batch_size: int
    accumulation: int
    global_batch: int
    step_seconds: float
    mfu: float
    basis: str  # of the device's speeds: measured, calibrated or data sheet
    attention: str  # the attention kernel that they are of, "" where none is named
    time_parts: tuple[Part, ...]
    memory: Memory
    held: tuple[Part, ...]
    groups: tuple[Group, ...]
    baselines: tuple[BaselineRow, ...]
    certificate: Certificate
    trained: int | None = None
    assumptions: tuple[str, ...] = ()
    layout: OuterLayout = NO_LAYOUT
    unused: tuple[str, ...] = ()  # parameters on which the loss does not depend
    host: HostMemory | None = None  # where units, or inputs of blocks, are on the host
    buckets: tuple[int, ...] = ()  # units that are reduced together


@dataclass(frozen=True)
class RemedyRow:
    """A change, the peak it reaches, and what it saves."""

    change: str
    peak_bytes: int
    saved_bytes: int
    fits: bool
    estimate: bool = False


@dataclass(frozen=True)
class MisfitPage:
    """Everything that the page about a model that does not fit shows."""

    message: str
    memory: Memory
    remedies: tuple[RemedyRow, ...]

    @property
    def excess_bytes(self) -> int:
        return self.memory.peak_bytes - self.memory.limit_bytes


def plan_page(plan: Plan) -> PlanPage:
    predicted = plan.predicted
    seq_len = plan.model.seq_len
    return PlanPage(
        model=plan.model.name,
        parameters=plan.model.parameters,
        seq_len=seq_len,
        cluster=plan.layout.whole or plan.cluster.label,
        layout=plan.layout,
        world_size=plan.cluster.world_size,
        precision=plan.precision,
        reduce_dtype=plan.reduce_dtype,
        optimizer=plan.optimizer,
        compiled=plan.compiled,
        loss_chunks=plan.loss_chunks,
        samples_per_second=predicted.samples_per_second,
        tokens_per_second=None if seq_len is None else seq_len * predicted.samples_per_second,
        batch_size=plan.batch_size,
        accumulation=plan.accumulation,
        global_batch=plan.global_batch,
        step_seconds=predicted.step_seconds,
        mfu=predicted.mfu,
        basis=plan.cluster.device.basis,
        attention=plan.cluster.device.attention,
        time_parts=parts_of(predicted.time_parts, predicted.step_seconds),
        memory=Memory(
            predicted.peak_bytes,
            predicted.limit_bytes,
            predicted.peak_at,
            parts_of(predicted.memory_parts, predicted.peak_bytes),
            parts_of(plan.cluster.reserve, plan.cluster.total_bytes),
            predicted.idle_pool_bytes,
        ),
        held=held_shares(plan.units),
        groups=grouped(plan.units),
        baselines=tuple(_baseline_row(each, predicted.samples_per_second) for each in plan.baselines),
        certificate=plan.certificate,
        trained=plan.model.trained,
        assumptions=plan.model.assumptions,
        unused=plan.model.unused,
        buckets=tuple(map(len, plan.buckets.values())),
        host=_host(plan),
    )


def _host(plan: Plan) -> HostMemory | None:
    there = sum(unit.parameters for unit in plan.units if unit.offload)
    blocks = len({unit.block for unit in plan.units if unit.recompute is Recompute.ON_HOST})
    if not there and not blocks:
        return None
    return HostMemory(
        plan.predicted.host_peak_bytes,
        plan.predicted.host_limit_bytes,
        plan.cluster.host_total_bytes,
        there / sum(unit.parameters for unit in plan.units),
        plan.cluster.host_memory_bytes is None,
        blocks,
    )


def host_sentence(host: HostMemory) -> str:
    """Why something is on the host, and whose figures these are."""
    whose = "assumed of a usual machine; --host-memory states another" if host.is_assumed else "as given"
    share = f"{100 * host.parameter_share:.0f} % of the parameters, with their gradients and optimizer states,"
    inputs = f"the input{'' if host.blocks == 1 else 's'} of {host.blocks} block{'' if host.blocks == 1 else 's'}"
    there = [*([share] if host.parameter_share else []), *([inputs] if host.blocks else [])]
    verb = "is" if there == [inputs] and host.blocks == 1 else "are"
    return (
        f"nothing fits on the devices alone: {' and '.join(there)} {verb} on the host"
        f" ({format_bytes(host.total_bytes)} a node, {whose}); how fast it is follows from data sheets and estimates,"
        " no device has run it"
    )


def settings_sentence(page: PlanPage) -> str:
    """The model's size, and how it is trained."""
    frozen = page.trained is not None and page.trained < page.parameters
    trained = f", {format_count(page.trained or 0)} of them trained" if frozen else ""
    length = "" if page.seq_len is None else f", {page.seq_len} tokens a sample"
    chunks = f", loss in {page.loss_chunks} chunks" if page.loss_chunks > 1 else ""
    return (
        f"{format_count(page.parameters)} parameters{trained}{length}; {page.precision}, gradients reduced in"
        f" {page.reduce_dtype}, {page.optimizer}{', blocks compiled' if page.compiled else ''}{chunks}"
    )


BASES = {
    MEASURED: "speeds: measured on these devices",
    CALIBRATED: "speeds: calibrated on published runs on such devices",
    DATA_SHEET: "speeds: from data sheets and estimates; osdp profile measures them",
}


def pools_sentence(memory: Memory) -> str:
    """What torch reports as reserved; see [Note: Pools] in osdp.cost.positions."""
    left = memory.limit_bytes + sum(part.amount for part in memory.reserve if part.name in (FRAGMENTS, RESERVED))
    pools = memory.peak_bytes + memory.idle_pool_bytes
    why = "streams do not share what they have freed"
    if pools > left:
        return (
            f"torch would reserve {format_bytes(pools)}, as {why}: of {format_bytes(left)} it gives some back in every"
            " step, which may cost time"
        )
    return f"torch reserves {format_bytes(min(left, pools * left / memory.limit_bytes))}, as {why}"


def speeds_sentence(page: PlanPage) -> str:
    """Where the predicted speeds come from, and which attention kernel they are for."""
    kernel = f"; attention: {KERNELS[page.attention]} (--attention for another)" if page.attention else ""
    return BASES[page.basis] + kernel


SAME = 1.0005
WORTH_IT = 1.02  # times the best baseline: below that a plan gains little


def way_name(name: str, recompute: Recompute) -> str:
    """A baseline, as people call it."""
    return name if recompute is Recompute.NONE else f"{name} with {recompute} recompute"


def gain_sentence(page: PlanPage) -> str:
    """What the plan gains over the best of the baselines."""
    fitting = [row for row in page.baselines if row.ratio is not None]
    if not fitting:
        return "no baseline fits" if page.baselines else ""
    best = min(fitting, key=lambda row: row.ratio or 0.0)
    name = way_name(best.name, best.recompute)
    ratio = best.ratio or 0.0
    if ratio >= WORTH_IT:
        return f"{ratio:.2f} times the best baseline, {name}"
    if ratio < SAME:
        return f"{name} is as fast: a plan gains nothing here"
    return f"{name} is as fast within {100 * max(ratio - 1, 0.0):.1f} %: a plan is hardly worth it here"


SHOWN_NAMES = 3


def unused_sentence(page: PlanPage) -> str:
    """The parameters that are held and not trained, because the loss does not depend on them."""
    if not page.unused:
        return ""
    more = f" and {len(page.unused) - SHOWN_NAMES} more" if len(page.unused) > SHOWN_NAMES else ""
    return f"the loss does not depend on {', '.join(page.unused[:SHOWN_NAMES])}{more}: stored, and not trained"


def misfit_page(error: DoesNotFit) -> MisfitPage:
    parts = parts_of(error.memory_parts, error.peak_bytes)
    return MisfitPage(
        message=str(error),
        memory=Memory(error.peak_bytes, error.limit_bytes, error.peak_at, parts),
        remedies=tuple(
            RemedyRow(
                change=each.change,
                peak_bytes=each.peak_bytes,
                saved_bytes=error.peak_bytes - each.peak_bytes,
                fits=each.peak_bytes <= (each.limit_bytes or error.limit_bytes),
                estimate=each.estimate,
            )
            for each in sorted(error.remedies, key=lambda remedy: remedy.peak_bytes)
        ),
    )


def parts_of(amounts: Mapping[str, float], whole: float) -> tuple[Part, ...]:
    """The parts that are there, largest first."""
    present = sorted(((amount, name) for name, amount in amounts.items() if amount), key=lambda pair: -pair[0])
    return tuple(Part(name, amount, amount / whole if whole else 0.0) for amount, name in present)


def held_shares(units: tuple[PlanUnit, ...]) -> tuple[Part, ...]:
    """How much of the model is held in each mode, in parameters; a split unit may be held in two."""
    amounts: dict[str, float] = dict.fromkeys(MODES, 0.0)
    for unit in units:
        sharded = unit.parameters if unit.mode == REPLICATE else unit.parameters * unit.sharded_splits / unit.splits
        amounts[unit.mode] += sharded
        amounts[REPLICATE] += unit.parameters - sharded
    return parts_of(amounts, sum(amounts.values()))


def grouped(units: tuple[PlanUnit, ...]) -> tuple[Group, ...]:
    """Units by block, and equal blocks together."""
    groups: list[Group] = []
    for block, members in groupby(units, key=lambda unit: unit.block):
        rows = list(members)
        if block is None:
            groups.extend(Group((unit.name,), False, unit.recompute, (_unit_row(unit, None),)) for unit in rows)
        else:
            groups.append(Group((block,), True, rows[0].recompute, tuple(_unit_row(unit, block) for unit in rows)))
    return tuple(
        Group(tuple(name for group in alike for name in group.names), *_choices(alike[0]))
        for alike in merged(groups, key=_key)
    )


def _choices(group: Group) -> tuple[bool, Recompute, tuple[UnitRow, ...]]:
    return group.is_block, group.recompute, group.units


def _key(group: Group) -> tuple[object, ...]:
    """Blocks are alike within one list of blocks; a unit outside blocks is like no other."""
    name = group.names[0]
    return (name.rpartition(".")[0], *_choices(group)) if group.is_block else (name,)


def _unit_row(unit: PlanUnit, block: str | None) -> UnitRow:
    name = unit.name if block is None else below(unit.name, block)
    return UnitRow(
        name=name,
        mode=unit.mode,
        splits=unit.splits,
        sharded_splits=unit.sharded_splits,
        reduce_once=unit.reduce_once,
        two_levels=unit.two_levels,
        parameters=unit.parameters,
        all_reduce_once=unit.all_reduce_once,
        gather_once=unit.gather_once,
        prefetch=unit.prefetch,
        offload=unit.offload,
    )


def _baseline_row(baseline: Baseline, samples_per_second: float) -> BaselineRow:
    comparable = baseline.feasible and baseline.samples_per_second > 0
    return BaselineRow(
        name=baseline.name,
        recompute=baseline.recompute,
        batch_size=baseline.batch_size,
        accumulation=baseline.accumulation,
        samples_per_second=baseline.samples_per_second,
        peak_bytes=baseline.peak_bytes,
        ratio=samples_per_second / baseline.samples_per_second if comparable else None,
    )
