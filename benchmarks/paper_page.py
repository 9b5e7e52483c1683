"""The paper's table as a page with plots, from the figures that `bench_paper_table` has kept. It imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Row

BASELINES = ("DDP", "ZeRO-2", "FSDP", "HSDP")
LAYOUTS = ("tensor", "pipeline")
OTHERS = ("paper's modes", *BASELINES, *LAYOUTS)


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, with the samples of a step over all devices if they are given."""

    model: str
    cluster: str
    memory: str | None
    precision: str
    global_batch: int | None = None

    @property
    def devices(self) -> int:
        return math.prod(int(number) for number in self.cluster.split("x")[:-1])


@dataclass(frozen=True)
class Figure:
    """One way at its best: samples a second of all devices, None where it does not fit; samples of a device and step."""

    way: str
    rate: float | None
    batch: int | None = None
    samples: int | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    recompute: str = ""
    reason: str = ""


Found = Mapping[tuple[Setting, str], Sequence[Figure]]


def rates(found: Found, setting: Setting) -> dict[str, float | None]:
    """Of all ways that are known in a setting."""
    return {each.way: each.rate for part in ("data", "layouts") for each in found.get((setting, part), ())}


def settings(found: Found) -> list[Setting]:
    return list(dict.fromkeys(setting for setting, _ in found))


def rows(found: Found) -> list[Row]:
    table = []
    for setting in settings(found):
        if setting.global_batch is not None:
            continue
        known = rates(found, setting)
        best = max((rate for way in BASELINES if (rate := known.get(way))), default=None)
        own = known.get("osdp")
        row: Row = {"model": setting.model, "cluster": setting.cluster, "memory": setting.memory or ""}
        for way in ("osdp", *OTHERS):
            row[way] = (known[way] or "–") if way in known else ""
        table.append({**row, "osdp / best": own / best if own and best else None})
    return table


def page(found: Found, published: Setting) -> str:
    raise NotImplementedError


def draw(found: Found, folder: Path) -> None:
    raise NotImplementedError
