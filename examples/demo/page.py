"""What the demonstration shows at its end: the ways to train side by side, predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from osdp.cluster import format_bytes
from osdp.planfile import Plan
from osdp.report.numbers import format_rate, format_seconds

from .worker import FSDP, FSDP2, PLAN

SETTLING_ROUNDS = 1  # the first makes the optimizer's states and the buffers of the collectives
NOTE = (
    "Predictions are for osdp's runtime. Plain FSDP2 waits for every collective on CPUs: the second row is what "
    "the runtime gains, the third what the plan adds."
)


@dataclass(frozen=True)
class Row:
    """One way to train; losses are the first step's and the mean of the last round's."""

    way: str
    step_seconds: float
    predicted_step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    predicted_peak_bytes: int
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Page:
    """`gain` is plain FSDP2's seconds over the plan's; `gains` are those of single rounds, ascending."""

    rows: tuple[Row, ...]
    limit_bytes: int
    ranks: int
    steps: int
    gain: float
    gains: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def page_of(plan: Plan, fsdp: Plan, measured: Mapping[str, Mapping[str, Any]], *, sample_tokens: int) -> Page:
    predicted = {FSDP2: fsdp.predicted, FSDP: fsdp.predicted, PLAN: plan.predicted}
    rounds = {name: settled(found["round_seconds"]) for name, found in measured.items()}
    rows = []
    for name, found in measured.items():
        seconds, losses = statistics.median(rounds[name]), found["losses"]
        last = losses[-(len(losses) // len(found["round_seconds"])) :]
        tokens = plan.global_batch * sample_tokens / seconds
        rows.append(
            Row(
                way=name,
                step_seconds=seconds,
                predicted_step_seconds=predicted[name].step_seconds,
                tokens_per_second=tokens,
                peak_bytes=found["peak_bytes"],
                predicted_peak_bytes=predicted[name].peak_bytes,
                first_loss=losses[0],
                last_loss=statistics.mean(last),
            )
        )
    by_name = {row.way: row.step_seconds for row in rows}
    return Page(
        rows=tuple(rows),
        limit_bytes=plan.predicted.limit_bytes,
        ranks=plan.cluster.world_size,
        steps=len(measured[PLAN]["losses"]),
        gain=by_name[FSDP2] / by_name[PLAN],
        gains=tuple(sorted(a / b for a, b in zip(rounds[FSDP2], rounds[PLAN], strict=True))),
    )


def settled(rounds: Sequence[float]) -> Sequence[float]:
    return rounds[SETTLING_ROUNDS:] or rounds


def verdict(page: Page) -> str:
    """The demonstration in a sentence, whichever way it went."""
    over = [row for row in page.rows if row.peak_bytes > page.limit_bytes]
    if over:
        what = " and ".join(f"{row.way} ({format_bytes(row.peak_bytes)})" for row in over)
        return f"The limit of {format_bytes(page.limit_bytes)} was exceeded by {what}."
    change = f"{abs(page.gain - 1):.0%}".replace("%", " %")
    how = "faster" if page.gain >= 1 else "slower"
    low, high = page.gains[0], page.gains[-1]
    return (
        f"The plan trains {change} {how} than plain FSDP2 within the same memory "
        f"({page.gain:.2f}×; single rounds {low:.2f}× to {high:.2f}×)."
    )


def print_page(page: Page, out: Console) -> None:
    out.print()
    out.print(Text(f"Trained: {page.steps} steps of each on {page.ranks} ranks, measured (predicted)", style="bold"))
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("way")
    for name in ("a step", "tokens/s", f"peak of {format_bytes(page.limit_bytes)}", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in page.rows:
        table.add_row(
            row.way,
            f"{format_seconds(row.step_seconds)} ({format_seconds(row.predicted_step_seconds)})",
            format_rate(row.tokens_per_second),
            f"{format_bytes(row.peak_bytes)} ({format_bytes(row.predicted_peak_bytes)})",
            f"{row.first_loss:.3f} → {row.last_loss:.3f}",
        )
    out.print(Padding(table, (0, 0, 0, 2), expand=False))
    for text, style in ((NOTE, "dim"), (verdict(page), "bold green" if page.gain >= 1 else "bold")):
        out.print()
        out.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))
