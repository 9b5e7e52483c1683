"""What tuning learnt: every plan that ran beside its prediction, the factors, and the fastest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from osdp.cluster import format_bytes
from osdp.report.numbers import format_rate, format_seconds
from osdp.report.printing import indented, make_table, print_heading, print_line

if TYPE_CHECKING:
    from osdp.tuning.run import Tuned

_UNCHANGED = 0.02  # factors nearer to 1 are not worth a word
_PARTS = {
    "compute": "compute",
    "communication": "communication",
    "host": "the host's time for an exchange",
    "optimizer": "the optimizer's step",
}


def print_tuned(tuned: Tuned, out: Console) -> None:
    first = tuned.tried[0]
    print_heading(out, f"Plans of {first.plan.model.name} that ran on {first.plan.cluster.word}")
    table = make_table(
        ("plan", "left"),
        ("batch", "right"),
        ("step", "right"),
        ("predicted", "right"),
        ("samples/s", "right"),
        ("peak", "right"),
        ("predicted", "right"),
    )
    for each in tuned.tried:
        micro = f"{each.plan.batch_size}" + (f" × {each.plan.accumulation}" if each.plan.accumulation > 1 else "")
        table.add_row(
            f"{each.origin}{' *' if each is tuned.best else ''}",
            micro,
            format_seconds(each.trial.step_seconds),
            f"{format_seconds(each.plan.predicted.step_seconds)} ({each.error:+.0%})",
            format_rate(each.samples_per_second),
            format_bytes(each.trial.peak_bytes) + ("" if each.fits else " !"),
            format_bytes(each.plan.predicted.peak_bytes),
        )
    out.print(indented(table))
    print_line(out, "* the fastest" + ("" if all(e.fits for e in tuned.tried) else "; ! more than the limit: not kept"))
    print_line(out, f"stopped: {tuned.stopped}")
    print_heading(out, "What was learnt")
    for sentence in learnt(tuned):
        print_line(out, sentence)


def learnt(tuned: Tuned) -> list[str]:
    """Which parts of a step take longer, or less, than the profile said."""
    said = []
    for part, factor in asdict(tuned.factors).items():
        if abs(factor - 1) > _UNCHANGED:
            said.append(f"{_PARTS[part]} takes {factor:.2f} times what the profile said")
    return said or ["the profile was right: nothing is corrected"]
