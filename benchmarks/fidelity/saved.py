"""What was measured: a file with one line of JSON for each model in each world, written as soon as that has ended.

A run that is ended in between has lost one model in one world at most, and the next one goes on behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """A model in a world: plans in these ways at these batch sizes, run in turn after one profile."""

    world: str
    across: str
    model: str
    ways: tuple[str, ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """The cases of a piece of work, and when they were taken."""

    work: Work
    date: str
    torch: str
    seconds: float
    cases: tuple[dict[str, Any], ...]

    @property
    def has_dry_runs(self) -> bool:
        return all("dry_peak_bytes" in case for case in self.cases)

    def with_cases(self, cases: Sequence[dict[str, Any]]) -> Done:
        return replace(self, cases=tuple(cases))

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def of_line(line: str) -> Done:
        read = json.loads(line)
        work = read.pop("work")
        ways, batches = tuple(work.pop("ways")), tuple(work.pop("batches"))
        return Done(Work(**work, ways=ways, batches=batches), **{**read, "cases": tuple(read["cases"])})


def read(file: Path) -> list[Done]:
    """Nothing where there is no such file; a last line that was cut off is left out."""
    if not file.exists():
        return []
    return [Done.of_line(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def append(file: Path, done: Done) -> None:
    """Behind what the file has, and on the disk when this returns."""
    write(file, [*read(file), done])


def write(file: Path, all_done: Sequence[Done]) -> None:
    """The whole file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.new")
    with beside.open("w") as lines:
        lines.writelines(done.line() for done in all_done)
        lines.flush()
        os.fsync(lines.fileno())
    beside.replace(file)
