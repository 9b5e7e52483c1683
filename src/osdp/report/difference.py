"""Two plans side by side: what they were asked for, what they predict, and which units they hold differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console

from osdp.cluster import format_bytes
from osdp.planfile import Plan, PlanUnit
from osdp.report.grouping import label_of, merged
from osdp.report.numbers import format_count, format_rate, format_seconds
from osdp.report.printing import indented, make_table, print_heading, print_line


@dataclass(frozen=True)
class Setting:
    """Something that both plans were asked for, with other values."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Figure:
    """A predicted figure of both plans; `unit` is bytes, seconds, share or rate."""

    name: str
    unit: str
    before: float
    after: float


@dataclass(frozen=True)
class UnitChange:
    """Units that both plans have and hold differently, those that change alike together; '' where one has none."""

    names: tuple[str, ...]
    before: str
    after: str
    parameters: int


@dataclass(frozen=True)
class PlanDifference:
    settings: tuple[Setting, ...]
    figures: tuple[Figure, ...]
    units: tuple[UnitChange, ...]
    same_units: int

    @property
    def runs_alike(self) -> bool:
        return not self.settings and not self.units


def plan_difference(before: Plan, after: Plan) -> PlanDifference:
    units, same = _units(before, after)
    return PlanDifference(tuple(_settings(before, after)), tuple(_figures(before, after)), units, same)


def _settings(before: Plan, after: Plan) -> Iterator[Setting]:
    read: dict[str, Callable[[Plan], object]] = {
        "model": lambda plan: plan.model.name,
        "parameters": lambda plan: f"{plan.model.parameters:,}",
        "tokens a sample": lambda plan: plan.model.seq_len,
        "cluster": lambda plan: plan.cluster.label,
        "memory limit": lambda plan: format_bytes(plan.predicted.limit_bytes),
        "precision": lambda plan: plan.precision,
        "gradients reduced in": lambda plan: plan.reduce_dtype,
        "optimizer": lambda plan: plan.optimizer,
        "blocks": lambda plan: "compiled" if plan.compiled else "eager",
        "chunks of the loss": lambda plan: plan.loss_chunks,
        "layout": lambda plan: plan.layout if plan.layout.is_larger else "data parallelism alone",
        "micro-batch": lambda plan: plan.batch_size,
        "accumulation": lambda plan: plan.accumulation,
        "global batch": lambda plan: plan.global_batch,
    }
    for name, value in read.items():
        old, new = str(value(before)), str(value(after))
        if old != new:
            yield Setting(name, old, new)


def _figures(before: Plan, after: Plan) -> Iterator[Figure]:
    old, new = before.predicted, after.predicted
    yield Figure("samples/s", "rate", old.samples_per_second, new.samples_per_second)
    yield Figure("step", "seconds", old.step_seconds, new.step_seconds)
    yield Figure("MFU", "share", old.mfu, new.mfu)
    yield Figure("peak memory", "bytes", old.peak_bytes, new.peak_bytes)
    yield Figure("memory of a host", "bytes", old.host_peak_bytes, new.host_peak_bytes)
    for name in dict.fromkeys((*old.time_parts, *new.time_parts)):
        yield Figure(name, "seconds", old.time_parts.get(name, 0.0), new.time_parts.get(name, 0.0))
    for name in dict.fromkeys((*old.memory_parts, *new.memory_parts)):
        yield Figure(f"{name} at the peak", "bytes", old.memory_parts.get(name, 0), new.memory_parts.get(name, 0))


def _units(before: Plan, after: Plan) -> tuple[tuple[UnitChange, ...], int]:
    old, new = ({unit.name: unit for unit in plan.units} for plan in (before, after))
    changes, same = [], 0
    for name in dict.fromkeys((*old, *new)):
        one, other = _held(old.get(name)), _held(new.get(name))
        if one == other:
            same += 1
        else:
            parameters = (new.get(name) or old[name]).parameters
            changes.append(UnitChange((name,), one, other, parameters))
    together = merged(changes, key=lambda each: (each.before, each.after, each.parameters))
    return tuple(
        UnitChange(tuple(n for each in alike for n in each.names), alike[0].before, alike[0].after, alike[0].parameters)
        for alike in together
    ), same


def _held(unit: PlanUnit | None) -> str:
    if unit is None:
        return ""
    words = [unit.mode]
    if unit.splits > 1:
        words.append(f"{unit.sharded_splits} of {unit.splits} slices")
    words += [unit.recompute.words] if unit.recompute else []
    words += [text for given, text in _FLAGS.items() if getattr(unit, given)]
    words += [f"reduced with {unit.reduced_with}"] if unit.reduced_with is not None else []
    words += ["prefetch of two"] if unit.prefetch > 1 else []
    return ", ".join(words)


_FLAGS = {
    "reduce_once": "reduced once",
    "all_reduce_once": "all-reduced once",
    "gather_once": "gathered once",
    "two_levels": "two levels",
    "offload": "on the host",
}


# ---- printing


def print_difference(found: PlanDifference, names: tuple[str, str], out: Console) -> None:
    if found.settings:
        print_heading(out, "Asked for")
        _table(out, names, [(each.name, each.before, each.after, "") for each in found.settings])
    print_heading(out, "Predicted")
    _table(out, names, [_cells(each) for each in found.figures if each.before or each.after])
    print_heading(out, "Units")
    print_line(out, f"{found.same_units} units are sharded alike")
    wide = max(map(len, names))
    for each in found.units:
        apiece = " each" if len(each.names) > 1 else ""
        print_line(out, f"{label_of(each.names)}: {format_count(each.parameters)} parameters{apiece}")
        for name, held in zip(names, (each.before, each.after), strict=True):
            print_line(out, f"  {name:{wide}}  {held or 'no such unit'}")


def _cells(each: Figure) -> tuple[str, str, str, str]:
    form = {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "rate": format_rate,
        "share": lambda value: f"{100 * value:.1f} %",
    }[each.unit]
    change = f"{100 * (each.after / each.before - 1):+.1f} %" if each.before else ""
    return each.name, form(each.before), form(each.after), change


def _table(out: Console, names: tuple[str, str], rows: list[tuple[str, str, str, str]]) -> None:
    table = make_table(("", "left"), (names[0], "right"), (names[1], "right"), ("change", "right"))
    for row in rows:
        table.add_row(*row)
    out.print(indented(table))
