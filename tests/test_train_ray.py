"""Claims: the loop of the Ray example trains on two ranks and goes on; with Ray itself it does so too."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_train_loop.py"


def reported(config: dict[str, Any]) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    runpy.run_path(str(EXAMPLE))["train_steps"](config, found.append)
    return found


def twice(folder: Path) -> list[dict[str, float]]:
    same = {"cluster": "2xCPU", "checkpoint": str(folder), "save_every": 2}
    return reported({**same, "steps": 3}) + reported({**same, "steps": 4})


def test_the_loop_that_ray_calls_trains_and_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(2, twice, tmp_path):
        assert [each["step"] for each in found] == [1, 2, 3, 4]
        assert found[-1]["loss"] < found[0]["loss"] - 0.3


@pytest.mark.slow  # Ray's own processes take half a minute to start
def test_ray_starts_the_workers_and_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    def losses(steps: int) -> dict[int, float]:
        command = [sys.executable, str(EXAMPLE), str(tmp_path / "run"), str(steps)]
        quiet = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "HOME": str(tmp_path)}
        run = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=280)
        assert run.returncode == 0, run.stderr
        lines = re.findall(r"step (\d+): loss ([\d.]+), mean of 2 workers", run.stdout + run.stderr)
        return {int(number): float(loss) for number, loss in lines}

    first, second = losses(3), losses(5)
    assert sorted(first) == [1, 2, 3] and sorted(second) == [4, 5]
    assert second[5] < first[1] - 0.5
