"""Runs settings on simulated clusters and keeps what is found, line by line, in a file for each."""

from __future__ import annotations

import json
import os
import platform
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

from .cells import Setting
from .log import Log
from .meter import environment

STAGES = ("profile", "memory", "plans", "trials", "limits", "rounds")
CLOCK = ("profile", "trials", "rounds")  # these want the machine alone; the others look at memory only
MOST_STARTS = 4  # of a setting: a way that breaks a run is left out of the next
LEAST_SECONDS = 30.0  # to begin a setting
GRACE_SECONDS = 60.0  # for what is under way when the time is over
PACKAGES = ("torch", "deepspeed", "megatron-fsdp", "transformers", "highspy")


@dataclass(frozen=True)
class Limits:
    seconds: float
    rounds: int
    profile_seconds: float
    stages: tuple[str, ...] = STAGES


def log_file(folder: Path, setting: Setting, what: str) -> Path:
    return folder / f"{what}-{setting.name}.jsonl"


def run_settings(settings: Sequence[Setting], folder: Path, limits: Limits, *, what: str) -> None:
    """As many as the time allows; those that are done are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    for setting in settings:
        run = _Run(setting, log_file(folder, setting, what), what=what)
        if Log.read(run.file).last("done"):
            continue
        left = limits.seconds - (perf_counter() - began)
        if left < LEAST_SECONDS:
            print(f"{left:.0f} s are left, too little for {setting.name}", file=sys.stderr)
            return
        run.fill(limits, left)


class _Run:
    """A setting's ranks; every line that rank 0 prints is appended at once."""

    def __init__(self, setting: Setting, file: Path, *, what: str) -> None:
        self.setting, self.file, self.what = setting, file, what
        self.way = ""  # under way

    def fill(self, limits: Limits, seconds: float) -> None:
        began = perf_counter()
        self._append({"what": "about", "setting": self.setting.to_dict(), "stages": limits.stages, **about()})
        for _ in range(MOST_STARTS):
            left = seconds - (perf_counter() - began)
            failed = self._start(limits, max(LEAST_SECONDS, left))
            if failed is None or self.way in ("", "rounds"):
                return
            self._append({"what": "none", "way": self.way, "why": failed, "share": None})
            print(f"{self.setting.name}: {self.way} broke the run ({failed}); again without", file=sys.stderr)

    def _start(self, limits: Limits, seconds: float) -> str | None:
        """Runs it; gives why it failed, None where it did not."""
        setting = self.setting
        command = [sys.executable, "-m", f"benchmarks.rivals.{_WORKERS[self.what]}"]
        command += ["--setting", json.dumps(setting.to_dict()), "--log", str(self.file.absolute())]
        command += ["--stages", ",".join(limits.stages), "--seconds", str(seconds)]
        command += ["--rounds", str(limits.rounds), "--profile-seconds", str(limits.profile_seconds)]
        clock = any(stage in CLOCK for stage in limits.stages)  # else ranks may use what CPUs there are
        try:
            with SimulatedCluster(
                hosts=setting.hosts, ranks_per_host=setting.ranks_per_host, across=setting.across, devices=clock
            ) as cluster:
                timeout = seconds + GRACE_SECONDS
                results = cluster.run(command, env=environment(), timeout=timeout, on_line=self._on_line)
        except ClusterTimeout as error:
            print(f"{setting.name}: {error}", file=sys.stderr)
            return None
        failed = first_failure(results)
        if failed is None:
            return None
        print(failed.stderr[-3000:], file=sys.stderr)
        last = [line for line in failed.stderr.strip().splitlines() if line.strip()][-1:]
        return f"rank {failed.rank} ended with {failed.exit_code}: {''.join(last)[:300]}"

    def _on_line(self, start: Start, stream: str, line: str) -> None:
        if start.rank or stream != "stdout" or not line.startswith('{"what"'):
            return
        told = json.loads(line)
        if told["what"] == "begin":
            self.way = told["way"]
            print(f"{datetime.now(UTC):%H:%M:%S} {self.setting.name}: {self.way}", file=sys.stderr, flush=True)
        else:
            self._append(told)

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


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
