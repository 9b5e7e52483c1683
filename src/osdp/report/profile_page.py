"""A profile as rows: each figure beside the catalogue's, each fit with its error. Computed first, then printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from osdp.cluster import Cluster
from osdp.cluster.measured import TimedStage
from osdp.report.numbers import format_rate, format_seconds
from osdp.report.printing import EMPTY, indented, make_table, print_heading, print_line

if TYPE_CHECKING:
    from osdp.profiling.engine import CheckedPass
    from osdp.profiling.line_fit import Fit
    from osdp.profiling.run import Profile


class FigureRow(NamedTuple):
    """Rates are per second; `catalogue` is what a step was expected to reach, None where it says nothing."""

    name: str
    unit: str
    measured: float
    catalogue: float | None
    median_error: float | None
    worst_error: float | None


class CollectiveRow(NamedTuple):
    kind: str
    group: str
    latency_seconds: float
    bytes_per_second: float
    busy_fraction: float
    catalogue_seconds: float  # of 1 MiB
    measured_seconds: float
    median_error: float
    worst_error: float
    outliers: int


class OptimizerRow(NamedTuple):
    name: str
    tensor_seconds: float
    byte_seconds: float
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class ProfilePage:
    cluster: str
    seconds: float
    figures: tuple[FigureRow, ...]
    collectives: tuple[CollectiveRow, ...]
    unit_overhead_seconds: float
    collective_overhead_seconds: float
    tensor_seconds: float
    copy_byte_seconds: float
    overlap: float
    passes: tuple[CheckedPass, ...]
    optimizers: tuple[OptimizerRow, ...]
    model: str | None
    stages: tuple[TimedStage, ...]
    rounds: tuple[float, ...]
    notes: tuple[str, ...]


SIZE = 1 << 20


def profile_page(profile: Profile) -> ProfilePage:
    return ProfilePage(
        cluster=profile.cluster.word,
        seconds=profile.seconds,
        figures=tuple(_figures(profile)),
        collectives=tuple(_collectives(profile)),
        unit_overhead_seconds=profile.cluster.unit_overhead_seconds,
        collective_overhead_seconds=profile.cluster.collective_overhead_seconds,
        tensor_seconds=profile.cluster.tensor_seconds,
        copy_byte_seconds=profile.cluster.copy_byte_seconds,
        overlap=profile.cluster.overlap,
        passes=() if profile.engine is None else profile.engine.passes,
        optimizers=tuple(
            OptimizerRow(each.timed.name, each.timed.tensor_seconds, each.timed.byte_seconds, *_errors(each.fit))
            for each in profile.optimizers
        ),
        model=profile.model,
        stages=profile.cluster.stages,
        rounds=profile.rounds,
        notes=profile.notes,
    )


def _errors(fit: Fit) -> tuple[float, float]:
    return fit.median_error, fit.worst_error


def _figures(profile: Profile) -> list[FigureRow]:
    known, rows = profile.catalogue, []
    for rate in profile.rates:
        if rate.what == "memory":
            reach = None if known is None else known.memory_bytes_per_second * known.memory_efficiency
            rows.append(FigureRow("memory", "GB/s", rate.per_second, reach, *_errors(rate.fit)))
            continue
        reach = None if known is None else known.peak_flops[rate.dtype] * known.matmul_efficiency
        rows.append(FigureRow(f"{rate.what}, {rate.dtype}", "GFLOP/s", rate.per_second, reach, *_errors(rate.fit)))
    kernel = None if known is None else known.kernel_seconds
    rows.append(FigureRow("a kernel", "s", profile.cluster.device.kernel_seconds, kernel, None, None))
    return rows


def _collectives(profile: Profile) -> list[CollectiveRow]:
    cluster, form = profile.cluster, profile.catalogue or profile.cluster.device
    expected = Cluster.of(form, nodes=cluster.nodes, devices_per_node=cluster.devices_per_node)
    rows = []
    for each in profile.collectives:
        kind, group = each.measured.kind, each.measured.group
        rows.append(
            CollectiveRow(
                kind,
                group,
                each.measured.latency_seconds,
                each.measured.bytes_per_second,
                each.measured.busy_fraction,
                expected.collective_seconds(kind, group, SIZE),
                cluster.collective_seconds(kind, group, SIZE),
                *_errors(each.fit),
                each.fit.outliers,
            )
        )
    return rows


# ---- printing


def print_profile(page: ProfilePage, out: Console) -> None:
    print_heading(out, f"{page.cluster}, measured in {format_seconds(page.seconds)}")
    print_line(out, "errors are a fit's median and worst relative errors")
    if page.rounds:
        shortest, longest = format_seconds(min(page.rounds)), format_seconds(max(page.rounds))
        print_line(out, f"all but the device in {len(page.rounds)} rounds of {shortest} to {longest}")
    _print_figures(page, out)
    if page.collectives:
        _print_collectives(page, out)
        _print_engine(page, out)
    _print_optimizers(page, out)
    if page.stages:
        _print_stages(page, out)
    if page.notes:
        print_heading(out, "Notes")
        for note in page.notes:
            print_line(out, note)


def _percent(error: float | None) -> str:
    return EMPTY if error is None else f"{100 * error:.0f} %"


def _print_figures(page: ProfilePage, out: Console) -> None:
    print_heading(out, "The device, all ranks computing at once")
    table = make_table(
        *(("", "left"), ("measured", "right"), ("catalogue", "right"), ("", "left")),
        *(("error", "right"), ("worst", "right")),
    )
    for row in page.figures:
        scale = 1.0 if row.unit == "s" else 1e9
        shown = format_seconds if row.unit == "s" else lambda value: format_rate(value)
        catalogue = EMPTY if row.catalogue is None else shown(row.catalogue / scale)
        unit = "" if row.unit == "s" else row.unit
        errors = _percent(row.median_error), _percent(row.worst_error)
        table.add_row(row.name, shown(row.measured / scale), catalogue, unit, *errors)
    out.print(indented(table))


def _print_collectives(page: ProfilePage, out: Console) -> None:
    print_heading(out, "Collectives")
    table = make_table(
        *(("", "left"), ("group", "left"), ("latency", "right"), ("MB/s", "right"), ("busy", "right")),
        *(("1 MiB", "right"), ("catalogue", "right"), ("error", "right"), ("worst", "right")),
    )
    for row in page.collectives:
        table.add_row(
            *(row.kind, row.group, format_seconds(row.latency_seconds), format_rate(row.bytes_per_second / 1e6)),
            f"{row.busy_fraction:.2f}",
            *(format_seconds(row.measured_seconds), format_seconds(row.catalogue_seconds)),
            *(_percent(row.median_error), _percent(row.worst_error)),
        )
    out.print(indented(table))
    outliers = sum(row.outliers for row in page.collectives)
    if outliers:
        print_line(out, f"{outliers} timings stayed off their line by more than a factor of two after repetition")


def _print_engine(page: ProfilePage, out: Console) -> None:
    print_heading(out, "The engine on stacks of blocks")
    table = make_table(
        *(("blocks", "left"), ("mode", "left"), ("pass", "left")),
        *(("measured", "right"), ("predicted", "right"), ("error", "right")),
    )
    for each in page.passes:
        seconds = each.measured_seconds, each.predicted_seconds
        error = f"{100 * (each.predicted_seconds / each.measured_seconds - 1):+.0f} %"
        table.add_row(each.blocks, each.mode, each.which, *map(format_seconds, seconds), error)
    out.print(indented(table))
    host = (
        page.unit_overhead_seconds,
        page.collective_overhead_seconds,
        page.tensor_seconds,
        SIZE * page.copy_byte_seconds,
    )
    unit, collective, tensor, copy = map(format_seconds, host)
    print_line(
        out,
        f"host overhead: {unit} for a unit's pass, {collective} for a collective, {tensor} for a tensor in it, "
        f"{copy} for a MiB copied, beyond the memory's rate",
    )
    print_line(out, f"compute and communication overlap by {100 * page.overlap:.0f} % of the shorter one")


def _print_optimizers(page: ProfilePage, out: Console) -> None:
    print_heading(out, "Optimizers")
    table = make_table(("", "left"), ("a tensor", "right"), ("a MiB", "right"), ("error", "right"), ("worst", "right"))
    for row in page.optimizers:
        times = format_seconds(row.tensor_seconds), format_seconds(row.byte_seconds * SIZE)
        table.add_row(row.name, *times, _percent(row.median_error), _percent(row.worst_error))
    out.print(indented(table))


def _print_stages(page: ProfilePage, out: Console) -> None:
    print_heading(out, f"Stages of {page.model}: forward + backward")
    batches = page.stages[0].batches
    table = make_table(("", "left"), *((f"batch {batch}", "right") for batch in batches))
    for stage in page.stages:
        passes = zip(stage.forward_seconds, stage.backward_seconds, strict=True)
        table.add_row(stage.name, *(f"{format_seconds(f)} + {format_seconds(b)}" for f, b in passes))
    out.print(indented(table))
