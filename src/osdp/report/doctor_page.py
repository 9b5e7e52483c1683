"""The doctor's report on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from osdp.cluster import format_bytes
from osdp.report.numbers import format_seconds
from osdp.report.printing import EMPTY, indented, make_table, print_heading, print_line

if TYPE_CHECKING:
    from osdp.doctor.report import Report


def print_report(report: Report, out: Console) -> None:
    print_heading(out, f"{report.cluster}: {len(report.ranks)} ranks, {report.backend}, engine {report.engine}")
    print_line(out, ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    table = make_table(("rank", "right"), ("device", "left"), ("name", "left"), ("host", "left"), wraps=2)
    for rank in report.ranks:
        table.add_row(str(rank["rank"]), str(rank["device"]), str(rank["name"]), str(rank["host"]))
    out.print(indented(table))
    if report.links:
        print_heading(out, "Collectives")
        table = make_table(
            ("kind", "left"), ("group", "left"), ("bytes", "right"), ("measured", "right"), ("catalogue", "right")
        )
        for link in report.links:
            seconds = (format_seconds(link.seconds), format_seconds(link.catalogue_seconds))
            table.add_row(link.kind, link.group, format_bytes(link.total_bytes), *seconds)
        out.print(indented(table))
    print_heading(out, "Memory of a step, on the fullest rank")
    table = make_table(("mode", "left"), ("planned", "right"), ("allocated", "right"), ("reserved", "right"))
    for peak in report.peaks:
        reserved = EMPTY if peak.reserved_bytes is None else format_bytes(peak.reserved_bytes)
        table.add_row(peak.mode, format_bytes(peak.predicted_bytes), format_bytes(peak.allocated_bytes), reserved)
    out.print(indented(table))
    print_heading(out, f"Checks, in {report.seconds:.0f} s")
    for check in report.checks:
        word, style = ("ok    ", "green") if check.ok else ("FAILED", "bold red")
        off = f"{check.name}, off by {check.error:.1e} of {check.limit:g} allowed"
        out.print(indented(Text.assemble((word, style), f"  {off}")))
    for note in report.notes:
        print_line(out, note)
