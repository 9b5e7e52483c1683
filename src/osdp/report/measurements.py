"""What was measured of a plan: read from what `osdp train --json` and `osdp verify --json` print."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osdp.errors import UsageError
from osdp.files import read_file

REMEDY = "give what `osdp train --json` or `osdp verify --json` printed"


@dataclass(frozen=True)
class Measurement:
    """What was measured of a plan, and by what; None where it was not."""

    source: str
    step_seconds: float | None = None
    peak_bytes: int | None = None


def read_measurements(paths: Iterable[Path]) -> list[Measurement]:
    return [_read(path) for path in paths]


def _read(path: Path) -> Measurement:
    text = read_file(path, remedy=REMEDY).decode("utf-8", errors="replace")
    documents = list(_documents(text, path))
    end = next((each for each in documents if each.get("event") == "end" and each.get("steps")), None)
    if end is not None:
        seconds, peak = end.get("measured_step_seconds"), end.get("measured_peak_bytes")
        return Measurement(f"osdp train, {end['steps']} steps", _number(seconds, path), _whole(peak, path))
    verified = next((each for each in documents if "measured_peak_bytes" in each), None)
    if verified is not None:
        return Measurement("osdp verify, a dry run", None, _whole(verified["measured_peak_bytes"], path))
    raise UsageError(f"{path} has no measurement; {REMEDY}")


def _documents(text: str, path: Path) -> Iterable[dict[str, Any]]:
    """One JSON document, or one on each line."""
    try:
        whole = [json.loads(text)]
    except ValueError:
        try:
            whole = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise UsageError(f"{path} is not JSON ({error}); {REMEDY}") from None
    return [each for each in whole if isinstance(each, dict)]


def _number(value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e15:
        raise UsageError(f"{path} has {value!r:.40} where a positive number was expected; {REMEDY}")
    return float(value)


def _whole(value: Any, path: Path) -> int:
    return int(_number(value, path))
