"""Runs cells on simulated clusters and keeps what is found, line by line, in a file for each cell."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.cluster import ClusterTimeout, SimulatedCluster, first_failure
from benchmarks.cluster.ranks import Start

from .cells import Cell
from .meter import environment

MOST_STARTS = 4  # of a cell: rivals that break a run are left out of the next
FIRST_GUESS_SECONDS = 180.0  # of a cell, before any was measured
PACKAGES = ("torch", "deepspeed", "megatron-fsdp", "transformers", "highspy")


@dataclass(frozen=True)
class Limits:
    seconds: float
    rounds: int
    profile_seconds: float
    rungs: bool


def run_cells(cells: Sequence[Cell], folder: Path, limits: Limits, *, what: str, fresh: bool) -> None:
    """As many as the time allows; those that are done are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    began, taken = perf_counter(), []
    for cell in cells:
        file = folder / f"{what}-{cell.name}.json"
        if not fresh and file.exists() and json.loads(file.read_text()).get("done"):
            continue
        left = limits.seconds - (perf_counter() - began)
        if left < (statistics.median(taken) if taken else FIRST_GUESS_SECONDS) and taken:
            print(f"{left:.0f} s are left, too little for {cell.name}", file=sys.stderr)
            return
        start = perf_counter()
        Record(cell, file, what=what).fill(limits, left)
        taken.append(perf_counter() - start)


class Record:
    """What is known of a cell; every line that rank 0 prints is written at once."""

    def __init__(self, cell: Cell, file: Path, *, what: str) -> None:
        self.cell, self.file, self.what = cell, file, what
        self.rival = ""  # under way
        self.data: dict[str, Any] = {}

    def fill(self, limits: Limits, seconds: float) -> None:
        without: dict[str, str] = {}
        began = perf_counter()
        for _ in range(MOST_STARTS):
            self.data = {"name": self.cell.name, "cell": self.cell.to_dict(), **about(), "rivals": {}, "done": False}
            for name, why in without.items():
                self.data["rivals"][name] = {"why": why}
            left = seconds - (perf_counter() - began)
            failed = self._start(limits, list(without), max(60.0, left))
            if failed is None or not self.rival or self.rival == "rounds":
                return
            without[self.rival] = failed
            print(f"{self.cell.name}: {self.rival} broke the run ({failed}); again without", file=sys.stderr)

    def _start(self, limits: Limits, without: list[str], seconds: float) -> str | None:
        """Runs it; gives why it failed, None where it did not."""
        cell = self.cell
        command = [
            sys.executable,
            "-m",
            f"benchmarks.rivals.{_WORKERS[self.what]}",
            "--cell",
            json.dumps(cell.to_dict()),
        ]
        command += ["--rounds", str(limits.rounds), "--profile-seconds", str(limits.profile_seconds)]
        command += ["--without", json.dumps(without), *(["--rungs"] if limits.rungs else [])]
        try:
            with SimulatedCluster(hosts=cell.hosts, ranks_per_host=cell.ranks_per_host, across=cell.across) as cluster:
                results = cluster.run(command, env=environment(), timeout=seconds, on_line=self._on_line)
        except ClusterTimeout as error:
            print(f"{cell.name}: {error}", file=sys.stderr)
            return None
        failed = first_failure(results)
        if failed is None:
            return None
        last = [line for line in failed.stderr.strip().splitlines() if line.strip()][-1:]
        return f"rank {failed.rank} ended with {failed.exit_code}: {''.join(last)[:300]}"

    def _on_line(self, start: Start, stream: str, line: str) -> None:
        if start.rank or stream != "stdout" or not line.startswith('{"what"'):
            return
        told = json.loads(line)
        what, rival = told.pop("what"), told.pop("rival", "")
        if what == "begin":
            self.rival = rival
            print(f"{datetime.now(UTC):%H:%M:%S} {self.cell.name}: {rival}", file=sys.stderr, flush=True)
        elif what == "cell":
            self.data.update(told)
        elif what == "round":
            self.data["rivals"][rival].setdefault("rounds", []).append(told["seconds"])
        elif what == "done":
            self.data["done"] = True
        else:
            self.data["rivals"][rival] = told
        written = self.file.with_suffix(".part")
        written.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(written, self.file)


_WORKERS = {"throughput": "worker", "size": "size", "ablations": "ablations"}


def about() -> dict[str, Any]:
    """When, with what and where."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    machine = {"cores": os.cpu_count(), "processor": processor, "load": os.getloadavg()[0]}
    return {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "versions": versions, "machine": machine}
