"""The real commands, one process each: wall seconds, peak resident memory, and the seconds of the search itself.

The better of `--times` runs counts. Target: `gpt3-175b` on 1,024 devices within 30 s and 4 GiB, of which the search
takes at most 5 s; `llama3-8b` on 8 devices within 12 s; `osdp --help` within 1 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from common import Row, deliver, met, parser

GIB = 1 << 30
OSDP = (str(Path(sys.executable).parent / "osdp"),)


@dataclass(frozen=True)
class Case:
    """A command and its limits; None where nothing is asked."""

    name: str
    command: tuple[str, ...]
    seconds: float | None = None
    resident_bytes: int | None = None
    search_seconds: float | None = None


CASES = (
    Case("python, nothing else", (sys.executable, "-c", "pass")),
    Case("import osdp", (sys.executable, "-c", "import osdp")),
    Case("import torch", (sys.executable, "-c", "import torch")),
    Case("osdp --help", (*OSDP, "--help"), 1.0),
    Case(
        "osdp plan llama3-8b --cluster 8xA100-80GB",
        (*OSDP, "plan", "llama3-8b", "--cluster", "8xA100-80GB", "--json", "--quiet"),
        12.0,
    ),
    Case(
        "osdp plan gpt3-175b --cluster 128x8xH100-80GB",
        (*OSDP, "plan", "gpt3-175b", "--cluster", "128x8xH100-80GB", "--json", "--quiet"),
        30.0,
        4 * GIB,
        5.0,
    ),
)


@dataclass(frozen=True)
class Measured:
    seconds: float
    resident_bytes: int
    output: str


def measure(command: tuple[str, ...]) -> Measured:
    """Runs a command. Its memory is the highest that the kernel saw of that process; a child starts with its parent's,
    so this script imports little.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "stdout"
        with printed.open("w") as file:
            began = perf_counter()
            process = subprocess.Popen(command, stdout=file)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return Measured(seconds, usage.ru_maxrss * 1024, printed.read_text())


def rows_of(case: Case, times: int) -> list[Row]:
    """One row for each figure that a target names; one row without a target otherwise."""
    best = min((measure(case.command) for _ in range(times)), key=lambda each: each.seconds)
    figures: list[tuple[str, float, float | None]] = [("wall seconds", best.seconds, case.seconds)]
    memory = None if case.resident_bytes is None else case.resident_bytes / GIB
    figures.append(("peak resident GiB", best.resident_bytes / GIB, memory))
    if "plan" in case.command:
        certificate = json.loads(best.output)["certificate"]
        figures.append((f"search seconds, {certificate['status']}", certificate["seconds"], case.search_seconds))
        figures.append(("batch sizes solved exactly", certificate["batches_searched"], None))
    return [
        {
            "command": case.name,
            "figure": figure,
            "value": value,
            "at most": limit,
            "target": None if limit is None else met(value, limit),
        }
        for figure, value, limit in figures
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--times", type=int, default=2, help="runs of each command (default: %(default)s)")
    given = arguments.parse_args()
    rows = [row for case in CASES for row in rows_of(case, given.times)]
    deliver({f"Commands, the better of {given.times} runs": rows}, as_json=given.json)


if __name__ == "__main__":
    main()
