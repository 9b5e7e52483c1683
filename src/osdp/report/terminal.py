"""Prints pages with rich: readable at 80 columns, without colour where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, JustifyMethod
from rich.text import Text

from osdp.cluster import format_bytes
from osdp.cluster.device import CALIBRATED
from osdp.report.catalogue import DeviceRow, ModelRow
from osdp.report.graph_page import COLLECTIVES, GraphPage, Tally
from osdp.report.numbers import format_count, format_flops, format_rate, format_seconds, format_share
from osdp.report.page import (
    Group,
    HostMemory,
    Memory,
    MisfitPage,
    Part,
    PlanPage,
    RemedyRow,
    UnitRow,
    gain_sentence,
    host_sentence,
    pools_sentence,
    settings_sentence,
    speeds_sentence,
    unused_sentence,
)
from osdp.report.printing import EMPTY, indented, make_table, print_heading, print_line
from osdp.report.unit_notes import unit_notes

BAR_WIDTH = 30


# ---- the plan


def print_plan(page: PlanPage, out: Console) -> None:
    _print_headline(page, out)
    _print_memory(page.memory, out)
    if page.host is not None:
        _print_host(page.host, out)
    _print_groups(page, out)
    _print_baselines(page, out)
    _print_certificate(page, out)


def _print_headline(page: PlanPage, out: Console) -> None:
    print_heading(out, f"{page.model} on {page.cluster}")
    print_line(out, settings_sentence(page))
    if page.layout.is_larger:
        print_line(out, layout_sentence(page))
    tokens = "" if page.tokens_per_second is None else f"   {format_rate(page.tokens_per_second)} tokens/s"
    out.print()
    out.print(Text.assemble("  ", (f"{format_rate(page.samples_per_second)} samples/s", "bold green"), tokens))
    print_line(
        out,
        f"micro-batch {page.batch_size} × accumulation {page.accumulation} × {page.world_size} devices"
        f" = global batch {page.global_batch}",
    )
    print_line(out, f"step {format_seconds(page.step_seconds)}{_listed(page.time_parts, format_seconds)}")
    print_line(out, f"model FLOPs utilization (MFU) {100 * page.mfu:.1f} %")
    gain = gain_sentence(page)
    if gain:
        print_line(out, gain)
    print_line(out, speeds_sentence(page))
    if page.assumptions:
        print_line(out, f"assumed in tracing: {'; '.join(page.assumptions)}")
    if page.unused:
        print_line(out, unused_sentence(page))


def layout_sentence(page: PlanPage) -> str:
    """The layout, and what of the step its other dimensions take."""
    layout = page.layout
    kinds = (
        ("collectives of the tensor dimension", layout.tensor),
        ("all-to-alls of the experts", layout.expert),
        ("messages between stages", layout.pipeline),
    )
    waited = " and ".join(name for name, degree in kinds if degree > 1)
    waits = [f"{waited} {format_seconds(layout.tensor_seconds)}"]
    if layout.pipeline > 1:
        waits.append(f"bubble of the pipeline {format_seconds(layout.bubble_seconds)}")
    stage = f"; stage {layout.stage} of {layout.pipeline}" if layout.pipeline > 1 else ""
    experts = f", of which {layout.expert} share the experts" if layout.expert > 1 else ""
    return (
        f"layout {replace(layout, expert=1)} × data {page.world_size}{experts}{stage}; parameters, memory and units"
        f" below are one rank's share; of the step, {', '.join(waits)}"
    )


def _listed(parts: Sequence[Part], form: Callable[[float], str]) -> str:
    return ": " + ", ".join(f"{part.name} {form(part.amount)}" for part in parts) if parts else ""


def _print_memory(memory: Memory, out: Console) -> None:
    print_heading(out, "Memory of each device")
    style = "green" if memory.share <= 1 else "red"
    out.print(
        Text.assemble(
            "  ",
            (_bar(memory.share, out), style),
            f" {format_bytes(memory.peak_bytes)} of {format_bytes(memory.limit_bytes)} ({format_share(memory.share)})",
        )
    )
    print_line(out, f"peak at {memory.at}")
    if memory.reserve:
        print_line(out, f"reserved besides{_listed(memory.reserve, format_bytes)}")
    if memory.idle_pool_bytes:
        print_line(out, pools_sentence(memory))
    table = make_table(("part", "left"), ("bytes", "right"), ("of the peak", "right"), header=False)
    for part in memory.parts:
        table.add_row(part.name, format_bytes(part.amount), format_share(part.share))
    out.print(indented(table))


def _print_host(host: HostMemory, out: Console) -> None:
    print_heading(out, "Memory of each node's host")
    taken = f" {format_bytes(host.peak_bytes)} of {format_bytes(host.limit_bytes)} ({format_share(host.share)})"
    out.print(Text.assemble("  ", (_bar(host.share, out), "green"), taken))
    print_line(out, host_sentence(host))


def _bar(share: float, out: Console) -> str:
    full, empty = ("#", "-") if out.options.ascii_only else ("█", "░")
    filled = max(0, min(BAR_WIDTH, round(BAR_WIDTH * share)))
    return full * filled + empty * (BAR_WIDTH - filled)


def _print_groups(page: PlanPage, out: Console) -> None:
    print_heading(out, "Plan")
    held = ", ".join(f"{part.name} {format_share(part.share)}" for part in page.held)
    print_line(out, f"parameters by mode: {held}")
    rows = [row for group in page.groups for row in _unit_rows(group)]
    in_slices = any(row[2] not in ("", EMPTY) for row in rows)  # without slices, names have more room
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        *(("unit", "left"), ("mode", "left"), ("slices", "left"), ("recompute", "left")),
        ("parameters", "right"),
    )
    shown = [index for index in range(len(columns)) if in_slices or index != 2]
    table = make_table(*(columns[index] for index in shown))
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    out.print(indented(table))
    for note in unit_notes(page):
        print_line(out, note)


def _unit_rows(group: Group) -> Iterator[tuple[str, str, str, str, str]]:
    recompute = group.recompute.value if group.recompute else EMPTY
    total = format_count(group.parameters) + (" each" if len(group.names) > 1 else "")
    if len(group.units) == 1 and group.units[0].name in ("", *group.names):
        unit = group.units[0]
        yield group.label or "the whole model", _mode(unit), _slices(unit), recompute, total
        return
    yield group.label, "", "", recompute, total
    for unit in group.units:
        yield f"  {unit.name or 'the rest'}", _mode(unit), _slices(unit), "", format_count(unit.parameters)


def _mode(unit: UnitRow) -> str:
    return unit.mode + (", on the host" if unit.offload else "")


def _slices(unit: UnitRow) -> str:
    if unit.splits == 1:
        return EMPTY
    rest = unit.splits - unit.sharded_splits
    return f"{unit.splits}" if rest == 0 or unit.mode == "replicate" else f"{unit.splits}, {rest} replicate"


def _print_baselines(page: PlanPage, out: Console) -> None:
    if not page.baselines:
        return
    print_heading(out, f"Compared with {', '.join(dict.fromkeys(row.name for row in page.baselines))}")
    table = make_table(
        *(("way", "left"), ("recompute", "left"), ("batch", "right")),
        *(("samples/s", "right"), ("peak", "right"), ("gain", "right")),
    )
    for row in page.baselines:
        if row.ratio is None:
            cells = (EMPTY, "does not fit", format_bytes(row.peak_bytes), EMPTY)
        else:
            batch = f"{row.batch_size}" + (f"×{row.accumulation}" if row.accumulation > 1 else "")
            cells = (batch, format_rate(row.samples_per_second), format_bytes(row.peak_bytes), f"{row.ratio:.2f}×")
        table.add_row(row.name, row.recompute.value if row.recompute else EMPTY, *cells)
    out.print(indented(table))


def _print_certificate(page: PlanPage, out: Console) -> None:
    proof = page.certificate
    print_heading(out, "Proof")
    ended = "; the search ended at its time limit" if proof.status == "time limit" else ""
    print_line(
        out,
        f"no plan of the searched space exceeds {format_rate(proof.bound)} samples/s (gap {100 * proof.gap:.2f} %)"
        f"{ended}",
    )
    if page.buckets:
        print_line(out, "that is with every unit reduced by itself: joining reductions is a rule beyond the proof")
    if proof.fastest_batch_size > page.batch_size:
        print_line(
            out,
            f"the fastest plan found, {format_rate(proof.fastest_samples_per_second)} samples/s, has micro-batches of "
            f"{proof.fastest_batch_size}; this one has the smallest that come within 1 % of it",
        )
    sizes = "1 batch size" if proof.batches_searched == 1 else f"{proof.batches_searched} batch sizes"
    if page.host is not None:
        print_line(out, "among plans that use the host's memory, as none without it fits")
    found = f"{proof.options} options, {proof.nodes} branch-and-bound nodes, in {format_seconds(proof.seconds)}"
    searched = f"{sizes} searched" if proof.batches_searched else "no batch size searched beyond its bounds"
    print_line(out, f"{searched}, {found}")


# ---- nothing fits


def print_misfit(page: MisfitPage, out: Console) -> None:
    print_heading(out, "No plan fits")
    print_line(
        out,
        f"the smallest peak, {format_bytes(page.memory.peak_bytes)}, exceeds the limit of "
        f"{format_bytes(page.memory.limit_bytes)} by {format_bytes(page.excess_bytes)}",
    )
    _print_memory(page.memory, out)
    print_heading(out, "What would help")
    if not page.remedies:
        print_line(out, "more or larger devices, or a smaller model")
        return
    table = make_table(("change", "left"), ("smallest peak", "right"), ("saves", "right"), ("", "left"))
    for row in page.remedies:
        table.add_row(
            row.change,
            format_bytes(row.peak_bytes),
            format_bytes(row.saved_bytes) if row.saved_bytes else EMPTY,
            _verdict(row),
        )
    out.print(indented(table))


def _verdict(row: RemedyRow) -> str:
    if not row.fits:
        return "not enough alone"
    return "may fit (estimate)" if row.estimate else "fits"


# ---- the graph


_TALLY_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    *(("kind", "left"), ("group", "left"), ("count", "right")),
    *(("amount", "right"), ("time", "right")),
)


def print_graph(page: GraphPage, out: Console) -> None:
    phase = ""
    table = None
    for row in page.stages:
        if row.phase != phase or table is None:
            if table is not None:
                out.print(indented(table))
            phase = row.phase
            print_heading(out, phase.capitalize())
            table = make_table(("stage", "left"), *_TALLY_COLUMNS)
        for index, tally in enumerate(row.tallies):
            table.add_row(row.label if index == 0 else "", *_tally_cells(tally))
    if table is not None:
        out.print(indented(table))
    print_heading(out, f"Whole step, {page.nodes} operations")
    table = make_table(*_TALLY_COLUMNS)
    for tally in page.totals:
        table.add_row(*_tally_cells(tally))
    out.print(indented(table))


def _tally_cells(tally: Tally) -> tuple[str, str, str, str, str]:
    is_compute = tally.kind not in COLLECTIVES and tally.flops > 0
    amount = format_flops(tally.flops) if is_compute else format_bytes(tally.nbytes)
    return tally.kind, tally.group or EMPTY, str(tally.count), amount, format_seconds(tally.seconds)


# ---- catalogues


def print_models(rows: Sequence[ModelRow], out: Console) -> None:
    table = make_table(
        ("model", "left"), ("parameters", "right"), ("tokens", "right"), ("description", "left"), wraps=3
    )
    for row in rows:
        tokens = EMPTY if row.seq_len is None else str(row.seq_len)
        table.add_row(row.name, format_count(row.parameters), tokens, row.description)
    out.print(table)


def print_devices(rows: Sequence[DeviceRow], out: Console) -> None:
    table = make_table(
        *(("\ndevice", "left"), ("\nmemory", "right"), ("bf16\nTFLOP/s", "right"), ("fp32\nTFLOP/s", "right")),
        *(
            ("memory\nGB/s", "right"),
            ("in a node\nGB/s", "right"),
            ("network\nGB/s", "right"),
            ("speeds\nfrom", "left"),
        ),
    )
    for row in rows:
        rates = (row.memory_bytes_per_second, row.node_bytes_per_second, row.network_bytes_per_second)
        flops = (row.bf16_flops, row.fp32_flops)
        table.add_row(
            row.name,
            format_bytes(row.memory_bytes),
            *(format_rate(value / 1e12) for value in flops),
            *(format_rate(value / 1e9) for value in rates),
            "runs" if row.basis == CALIBRATED else "sheet",
        )
    out.print(table)
