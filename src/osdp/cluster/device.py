"""Devices: their figures, and the catalogue that comes with the package."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from osdp.cluster.link import Link, require_word
from osdp.cluster.schema import (
    Efficiency,
    HostRate,
    HostSeconds,
    MemoryBytes,
    Part,
    PerSecond,
    Reserve,
    ReservedBytes,
    Traffic,
)
from osdp.errors import UsageError
from osdp.files import check_fields, convert, plain

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""Rates a device must state; 'fp32' is torch's default, without TF32."""

MEASURED, CALIBRATED, DATA_SHEET = "measured", "calibrated", "data sheet"
BASES = (MEASURED, CALIBRATED, DATA_SHEET)
"""Where a device's speeds come from: a profile of it, published runs on it, or data sheets and estimates alone."""

KERNELS = {
    "flash-1": "FlashAttention 1, as runs of 2023 had it",
    "flash-2": "FlashAttention 2",
    "flash-3": "FlashAttention 3",
    "cudnn": "cuDNN's attention",
    "efficient": "torch's memory-efficient attention",
    "either": "FlashAttention 1 or 2, the mean of their seconds",
}
"""Which attention kernel an `attention_efficiency` is of; 'either' where nobody says how old the software is."""

_NOT_OF_A_DEVICE = ("reason", "link_efficiency", "aliases", "host_link")
_MAKERS = re.compile(r"\b(nvidia|amd|intel|instinct|geforce|tesla)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """One device as torch sees it: what it holds, how fast it computes, what it is joined by.

    Peaks are the datasheet's; the efficiencies say which part of them a real step reaches. `source` names
    where each group of figures comes from, so that a surprising plan can be traced to a figure, `basis` whether its
    speeds were measured, calibrated on published runs, or are a data sheet's.

    How kernels get from FLOPs and bytes to seconds is in [Note: Kernel rates] of osdp.cost.kernel_time; without an
    `attention_efficiency` all of them run by the simpler rule there. It is that of the kernel `attention`, and
    `attention_rates` has those of the others that the device runs: `with_attention` takes another. `busy_fraction` is
    the part of a collective's seconds that the computation beside it loses. Of the memory, `context_bytes`,
    `communicator_bytes` for each communicator, `workspace_bytes` and the part `reserve_fraction` of the rest, which the
    allocator's fragments take (`expandable_reserve_fraction` with expandable segments), are not planned with. Without
    `flash_attention`, as before NVIDIA's Ampere, torch's attention is memory-efficient in fp16 and fp32, and not fused
    in bf16.

    What units on the host depend on: `host_bytes_per_second`, of this device's link to it in one direction, and of the
    host, for each of a usual machine's devices, `host_memory_bytes` and `host_memory_bytes_per_second`. Where they are
    0, nothing is known of the host, and no unit is held there.
    """

    name: Annotated[str, Meta(min_length=1)]
    memory_bytes: MemoryBytes
    peak_flops: Mapping[str, PerSecond] = field(hash=False)
    memory_bytes_per_second: PerSecond
    node_link: Link
    network: Link
    overlap: bool
    matmul_efficiency: Efficiency
    memory_efficiency: Efficiency
    kernel_seconds: HostSeconds
    reserve_fraction: Reserve
    attention_efficiency: Part = 0.0
    attention: str = ""
    attention_rates: Mapping[str, Part] = field(default_factory=dict, hash=False)
    matmul_traffic: Traffic = 0.0
    speed_spread: Part = 0.0
    busy_fraction: Part = 0.0
    context_bytes: ReservedBytes = 0
    expandable_reserve_fraction: Reserve = 0.0
    communicator_bytes: ReservedBytes = 0
    workspace_bytes: ReservedBytes = 0
    flash_attention: bool = True
    host_bytes_per_second: HostRate = 0.0
    host_memory_bytes: ReservedBytes = 0
    host_memory_bytes_per_second: HostRate = 0.0
    basis: str = DATA_SHEET
    note: str = ""
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on CPUs, joined by gloo: no streams, and no memory but the machine's."""
        return self.name.upper().startswith("CPU")

    def __post_init__(self) -> None:
        check_fields(self, remedy=f"correct it for device {self.name!r}")
        for dtype in self.peak_flops:
            require_word(f"in the peak_flops of device {self.name!r}, dtype", dtype, DTYPES)
        missing = [dtype for dtype in DTYPES if dtype not in self.peak_flops]
        if missing:
            raise UsageError(
                f"peak_flops of device {self.name!r} lacks {', '.join(missing)};"
                " give every dtype, with the fp32 rate for one the device has no units for"
            )
        require_word("basis", self.basis, BASES)
        for kernel in (*self.attention_rates, *filter(None, [self.attention])):
            require_word("attention", kernel, tuple(KERNELS))

    def with_attention(self, kernel: str) -> Device:
        """The same with another generation's attention kernel, at its rate on this device."""
        if kernel not in self.attention_rates:
            known = ", ".join(self.attention_rates) or "none, as its attention is priced as its products are"
            raise UsageError(f"{self.name} has no rate for attention {kernel!r}; those it has: {known}")
        return replace(self, attention=kernel, attention_efficiency=self.attention_rates[kernel])

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Time of a matrix product of `flops` operations; a multiply and an add are two."""
        require_word("dtype", dtype, tuple(self.peak_flops))
        return flops / (self.peak_flops[dtype] * self.matmul_efficiency)

    def attention_seconds(self, flops: float, dtype: str) -> float:
        """Time of an attention kernel that does `flops` operations; 0 where the device states no efficiency for it."""
        require_word("dtype", dtype, tuple(self.peak_flops))
        return flops / (self.peak_flops[dtype] * self.attention_efficiency) if self.attention_efficiency else 0.0

    def memory_seconds(self, total_bytes: float) -> float:
        """Time of a kernel bound by reading and writing `total_bytes`: elementwise, norms, the optimizer."""
        return total_bytes / (self.memory_bytes_per_second * self.memory_efficiency)

    @property
    def knows_host(self) -> bool:
        """Whether what the host has, and how it is reached, is stated; ranks on CPUs have no other memory."""
        figures = self.host_bytes_per_second, self.host_memory_bytes, self.host_memory_bytes_per_second
        return all(figures) and not self.is_cpu

    def accelerates(self, dtype: str) -> bool:
        """Whether `dtype` has units of its own, so that choosing it over fp32 saves compute time."""
        require_word("dtype", dtype, tuple(self.peak_flops))
        return self.peak_flops[dtype] > self.peak_flops["fp32"]

    def to_dict(self) -> dict[str, Any]:
        """Every figure, so that a file that holds it does not depend on the catalogue."""
        return plain(self)


def devices() -> list[Device]:
    """Every device of the catalogue, in its order: NVIDIA by generation, AMD, Intel, CPU."""
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
    same = [each.name for each in known if _key(name) and _key(each.name).startswith(_key(name))]
    close = difflib.get_close_matches(_key(name), [_key(each.name) for each in known], n=3, cutoff=0.5)
    names = same or [by_key[key].name for key in close]
    hint = f"closest: {', '.join(names)}; " if names else ""
    raise UsageError(f"device {name!r} is not in the catalogue; {hint}osdp devices lists them")


def link_efficiency(name: str) -> float:
    """What collectives reach of the data sheet's rate of the catalogue's link of that name, or of any other link."""
    table = _table()
    default = table["defaults"]["link_efficiency"]
    named = (link for link in table["link"].values() if link["name"] == name)
    return next((link.get("link_efficiency", default) for link in named), default)


def _key(name: str) -> str:
    return re.sub(r"[-_\s]+", "", _MAKERS.sub("", name.replace("_", " "))).lower()


@functools.cache
def _table() -> dict[str, Any]:
    from importlib import resources  # here, because it costs more than the rest of the package to import

    return msgspec.toml.decode(resources.files("osdp.cluster").joinpath("devices.toml").read_bytes())


@functools.cache
def _catalogue() -> tuple[tuple[Device, ...], dict[str, Device]]:
    table = _table()
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

    def link(place: str) -> dict[str, Any]:
        figures = links[entry[place]]
        efficiency = figures.get("link_efficiency", defaults["link_efficiency"])
        rate = figures["peak_bytes_per_second"] * efficiency
        return {"bytes_per_second": rate, "latency_seconds": figures["latency_seconds"], "name": figures["name"]}

    places = ("node_link", "network")
    own = {key: value for key, value in {**defaults, **entry}.items() if key not in _NOT_OF_A_DEVICE}
    rates = own["attention_rates"]
    if "flash-1" in rates and "flash-2" in rates:
        rates["either"] = round(2 / (1 / rates["flash-1"] + 1 / rates["flash-2"]), 3)
    if rates:
        own["attention_efficiency"] = rates[own["attention"]]
    source = entry["source"] | {place: links[entry[place]]["source"] for place in places}
    table = {**own, **{place: link(place) for place in places}, "source": source}
    if "host_link" in entry:
        table["host_bytes_per_second"] = link("host_link")["bytes_per_second"]
        source["host_link"] = links[entry["host_link"]]["source"]
    return convert(Device, table, name=f"device {entry['name']}", remedy="correct devices.toml")
