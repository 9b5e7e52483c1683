"""What benchmarks share: rows with a target, a table of them, a clock, a free port. It imports no torch."""

from __future__ import annotations

import json
import random
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
Row = dict[str, Any]
WIDE = 165  # columns of a table that goes to a file


def parser(description: str | None) -> ArgumentParser:
    made = ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON document")
    return made


def met(value: float, target: float, *, least: bool = False) -> str:
    """Whether a figure is at most its target, or at least."""
    return "met" if (value >= target if least else value <= target) else "missed"


def timed(run: Callable[[], T], *, times: int = 1) -> tuple[T, float]:
    """The last result, and the least seconds of so many runs."""
    began = perf_counter()
    result = run()
    best = perf_counter() - began
    for _ in range(times - 1):
        began = perf_counter()
        result = run()
        best = min(best, perf_counter() - began)
    return result, best


def free_port() -> int:
    """A port that nobody has, below those that the system gives to connections: these take a free one any moment."""
    draw = random.SystemRandom()
    while True:
        try:
            with socket.create_server(("127.0.0.1", draw.randrange(10_000, 32_000))) as server:
                return server.getsockname()[1]
        except OSError:
            continue


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def deliver(tables: dict[str, Sequence[Row]], *, as_json: bool) -> None:
    """Prints tables of rows, each under its title; a row's keys are the columns, in order of first use."""
    if as_json:
        print(json.dumps(tables, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    for title, rows in tables.items():
        console.print(f"\n{title}")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for key in dict.fromkeys(key for row in rows for key in row):
            number = any(isinstance(row.get(key), int | float) for row in rows)
            table.add_column(key, justify="right" if number else "left")
        for row in rows:
            table.add_row(*(_text(row.get(str(column.header))) for column in table.columns))
        console.print(table)
