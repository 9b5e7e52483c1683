"""What the doctor found: facts, figures, and checks that passed or failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

REPORT_VERSION = 1


@dataclass(frozen=True)
class Check:
    """One claim; `error` is how far it is off, `limit` what is allowed, `remedy` what to do where it fails."""

    name: str
    error: float
    limit: float
    remedy: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # an error that is no number fails


@dataclass(frozen=True)
class MeasuredLink:
    """One collective over `total_bytes` in a group: seconds as measured here and as the catalogue has them."""

    kind: str
    group: str
    total_bytes: int
    seconds: float
    catalogue_seconds: float


@dataclass(frozen=True)
class MeasuredPeak:
    """A step's memory on the fullest rank: planned, allocated by tensors, and reserved by a caching allocator."""

    mode: str
    predicted_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    planned_reserve_bytes: int

    @property
    def error(self) -> float:
        return abs(self.predicted_bytes / max(1, self.allocated_bytes) - 1)


@dataclass(frozen=True)
class Report:
    """All of it; equal on all ranks but for `ranks`, which rank 0 has of all."""

    versions: Mapping[str, str]
    ranks: tuple[Mapping[str, Any], ...]
    cluster: str
    engine: str
    backend: str
    known_device: bool
    links: tuple[MeasuredLink, ...]
    peaks: tuple[MeasuredPeak, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def to_dict(self) -> dict[str, Any]:
        checks = [{**asdict(check), "ok": check.ok, "error": _number(check.error)} for check in self.checks]
        return {"version": REPORT_VERSION, "ok": not self.failed, **asdict(self), "checks": checks}


def _number(value: float) -> float | None:
    """None for what JSON cannot say."""
    return value if abs(value) < float("inf") else None
