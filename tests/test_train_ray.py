"""The loop of the Ray example trains on two ranks and goes on; Ray itself is not started."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from ranks import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_train_loop.py"


def reported(config: dict[str, Any]) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    runpy.run_path(str(EXAMPLE))["train_steps"](config, found.append)
    return found


def twice(folder: Path) -> list[dict[str, float]]:
    first, second = ({"cluster": "2xCPU", "checkpoint": str(folder), "steps": steps} for steps in (3, 4))
    return reported(first) + reported(second)


def test_the_loop_that_ray_would_call_trains_and_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(2, twice, tmp_path):
        assert [each["step"] for each in found] == [1, 2, 3, 4]
        assert found[-1]["loss"] < found[0]["loss"] - 0.3
