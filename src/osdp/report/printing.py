"""What all pages are printed with: a console, headings, lines and tables, readable at 80 columns."""

from __future__ import annotations

from typing import IO

from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

EMPTY = "–"


def console(stream: IO[str]) -> Console:
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def print_heading(out: Console, text: str) -> None:
    out.print()
    out.print(Text(text, style="bold"))


def print_line(out: Console, text: str) -> None:
    out.print(indented(Text(text)))


def indented(content: Table | Text) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def make_table(*columns: tuple[str, JustifyMethod], wraps: int = 0, header: bool = True) -> Table:
    """A table without lines; only the column `wraps` may take several lines."""
    table = Table(box=None, show_header=header, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, (name, justify) in enumerate(columns):
        table.add_column(name, justify=justify, overflow="fold", no_wrap=index != wraps)
    return table
