"""Devices: their figures, and the catalogue that comes with the package."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from osdp.cluster.link import Link, require_positive, require_word
from osdp.errors import UsageError

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""Rates a device must state; 'fp32' is torch's default, without TF32."""

_FRACTIONS = ("matmul_efficiency", "memory_efficiency")
_MAKERS = re.compile(r"\b(nvidia|amd|instinct|geforce|tesla)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """One device as torch sees it: what it holds, how fast it computes, what it is joined by.

    Peaks are the datasheet's; the efficiencies say which part of them a real step reaches. `source` names
    where each group of figures comes from, so that a surprising plan can be traced to a figure.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_second: float
    node_link: Link
    network: Link
    overlap: bool
    matmul_efficiency: float
    memory_efficiency: float
    kernel_seconds: float
    reserve_fraction: float
    note: str = ""
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on processors, joined by gloo: no streams, and no memory but the machine's."""
        return self.name.upper().startswith("CPU")

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))
        object.__setattr__(self, "source", dict(self.source))
        remedy = f"correct it for device {self.name!r}"
        if not self.name:
            raise UsageError("device name is empty; give it one, e.g. name = 'my-gpu'")
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int) or self.memory_bytes < 1:
            raise UsageError(f"memory_bytes is {self.memory_bytes!r} but must be an integer above 0; {remedy}")
        missing = [dtype for dtype in DTYPES if dtype not in self.peak_flops]
        if missing:
            raise UsageError(
                f"peak_flops of device {self.name!r} lacks {', '.join(missing)};"
                " give every dtype, with the fp32 rate for one the device has no units for"
            )
        for dtype, rate in self.peak_flops.items():
            require_positive(f"peak_flops {dtype}", rate, remedy)
        require_positive("memory_bytes_per_second", self.memory_bytes_per_second, remedy)
        for key in _FRACTIONS:
            value = getattr(self, key)
            require_positive(key, value, remedy)
            if value > 1:
                raise UsageError(f"{key} is {value!r} but is a fraction of the peak, at most 1; {remedy}")
        if self.kernel_seconds != 0:
            require_positive("kernel_seconds", self.kernel_seconds, remedy)
        require_fraction(self.reserve_fraction)

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Time of a matrix product of `flops` operations; a multiply and an add are two."""
        require_word("dtype", dtype, tuple(self.peak_flops))
        return flops / (self.peak_flops[dtype] * self.matmul_efficiency)

    def memory_seconds(self, total_bytes: float) -> float:
        """Time of a kernel bound by reading and writing `total_bytes`: elementwise, norms, the optimizer."""
        return total_bytes / (self.memory_bytes_per_second * self.memory_efficiency)

    def accelerates(self, dtype: str) -> bool:
        """Whether `dtype` has units of its own, so that choosing it over fp32 saves compute time."""
        require_word("dtype", dtype, tuple(self.peak_flops))
        return self.peak_flops[dtype] > self.peak_flops["fp32"]

    def to_dict(self) -> dict[str, Any]:
        """Every figure, so that a file that holds it does not depend on the catalogue."""
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "overlap": self.overlap,
            "matmul_efficiency": self.matmul_efficiency,
            "memory_efficiency": self.memory_efficiency,
            "kernel_seconds": self.kernel_seconds,
            "reserve_fraction": self.reserve_fraction,
            "note": self.note,
            "peak_flops": dict(self.peak_flops),
            "node_link": self.node_link.to_dict(),
            "network": self.network.to_dict(),
            "source": dict(self.source),
        }


def require_fraction(reserve_fraction: float) -> None:
    """Refuse a reserve that leaves nothing to plan with."""
    number = isinstance(reserve_fraction, (int, float)) and not isinstance(reserve_fraction, bool)
    if not number or not 0 <= reserve_fraction < 1:
        raise UsageError(f"reserve_fraction is {reserve_fraction!r} but must be at least 0 and below 1, e.g. 0.06")


def devices() -> list[Device]:
    """Every device of the catalogue, in its order: NVIDIA by generation, AMD, CPU."""
    return list(_catalogue()[0])


def device(name: str) -> Device:
    """The catalogue's device of that name.

    Case, '-', '_', spaces and a maker's prefix do not matter, so that torch's own names
    ('NVIDIA A100-SXM4-80GB', 'Tesla T4') find their device.
    """
    known, by_key = _catalogue()
    found = by_key.get(_key(name))
    if found is not None:
        return found
    close = difflib.get_close_matches(_key(name), [_key(each.name) for each in known], n=3, cutoff=0.5)
    names = [by_key[key].name for key in close]
    hint = f"closest: {', '.join(names)}; " if names else ""
    raise UsageError(f"device {name!r} is not in the catalogue; {hint}osdp devices lists them")


def _key(name: str) -> str:
    return re.sub(r"[-_\s]+", "", _MAKERS.sub("", name.replace("_", " "))).lower()


@functools.cache
def _catalogue() -> tuple[tuple[Device, ...], dict[str, Device]]:
    from importlib import resources  # here, because it costs more than the rest of the package to import

    table = tomllib.loads(resources.files("osdp.cluster").joinpath("devices.toml").read_text(encoding="utf-8"))
    known: list[Device] = []
    by_key: dict[str, Device] = {}
    for entry in table["device"]:
        one = _read_entry(entry, table["link"], table["defaults"])
        known.append(one)
        for name in (one.name, *entry.get("aliases", ())):
            by_key[_key(name)] = one
    return tuple(known), by_key


def _read_entry(entry: dict[str, Any], links: dict[str, Any], defaults: dict[str, Any]) -> Device:
    """One catalogue entry, with the catalogue-wide defaults where it states nothing of its own."""

    def link(place: str) -> Link:
        figures = links[entry[place]]
        efficiency = figures.get("link_efficiency", defaults["link_efficiency"])
        return Link(figures["peak_bytes_per_second"] * efficiency, figures["latency_seconds"], figures["name"])

    own = {key: entry.get(key, value) for key, value in defaults.items() if key not in ("reason", "link_efficiency")}
    return Device(
        name=entry["name"],
        memory_bytes=entry["memory_bytes"],
        peak_flops=entry["peak_flops"],
        memory_bytes_per_second=entry["memory_bytes_per_second"],
        node_link=link("node_link"),
        network=link("network"),
        note=entry.get("note", ""),
        source=entry["source"] | {place: links[entry[place]]["source"] for place in ("node_link", "network")},
        **own,
    )
