"""A plan beside its dry run, on one page: the peaks, their parts, the collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from osdp.cluster import format_bytes
from osdp.planfile import Plan
from osdp.report.printing import indented, make_table, print_heading

if TYPE_CHECKING:
    from osdp.verify import Tally, Verification


def print_verification(plan: Plan, found: Verification, out: Console) -> None:
    from osdp.verify import tallied  # here, as it loads torch

    print_heading(out, f"{plan.model.name} on {plan.cluster.label}, rank 0 of {plan.cluster.world_size}")
    _verdict(out, found.peak_matches, f"peak memory: {_peak(found)}")
    count = f"{len(found.issued):,} issued"
    same = f"{count}, all as planned, in order" if found.collectives_match else found.first_difference
    _verdict(out, found.collectives_match, f"collectives: {same}")
    if plan.compiled:
        out.print("  blocks of the dry run, and of this prediction, are eager code; the plan's are compiled")
    if found.micro_batches < plan.accumulation:
        out.print(f"  {found.micro_batches} of {plan.accumulation} micro-batches were run: those between are alike")

    print_heading(out, "Memory at the peak")
    out.print(f"  predicted at {found.predicted_at}")
    out.print(f"  measured at {found.measured_at}")
    rows = [
        (
            part,
            format_bytes(nbytes),
            format_bytes(found.measured_parts[part]),
            _signed(nbytes - found.measured_parts[part]),
        )
        for part, nbytes in found.predicted_parts.items()
        if nbytes or found.measured_parts[part]
    ]
    _print_table(out, ("part", "predicted", "measured", "difference"), rows, left=1)

    print_heading(out, "Collectives of the step")
    planned = {(t.kind, t.group): t for t in tallied([each.record for each in found.planned])}
    issued = {(t.kind, t.group): t for t in tallied(found.issued)}
    cells = [(*key, *_tally(planned.get(key)), *_tally(issued.get(key))) for key in {**planned, **issued}]
    _print_table(out, ("kind", "group", "planned", "bytes", "issued", "bytes"), cells, left=2)


def _peak(found: Verification) -> str:
    predicted, measured = format_bytes(found.predicted_peak_bytes), format_bytes(found.measured_peak_bytes)
    off = found.predicted_peak_bytes - found.measured_peak_bytes
    exact = "to the byte" if off == 0 else f"off by {off:+,} bytes, {100 * found.error:+.2f} %"
    return f"{predicted} predicted, {measured} measured ({exact})"


def _signed(nbytes: int) -> str:
    return "" if nbytes == 0 else f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes))}"


def _tally(tally: Tally | None) -> tuple[str, str]:
    return ("", "") if tally is None else (f"{tally.count:,}", format_bytes(tally.nbytes))


def _verdict(out: Console, agrees: bool, sentence: str) -> None:
    word, style = ("agrees", "bold green") if agrees else ("DIFFERS", "bold red")
    out.print(Text.assemble("  ", (word, style), f"  {sentence}"))


def _print_table(out: Console, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: int) -> None:
    table = make_table(*((name, "left" if index < left else "right") for index, name in enumerate(columns)))
    for row in rows:
        table.add_row(*row)
    out.print(indented(table))
