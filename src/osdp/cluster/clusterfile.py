"""Clusters as tables: the one form that plan files (JSON) and cluster files (TOML) share.

A cluster file, with everything but the first lines optional:

    name = "lab"
    nodes = 2
    devices_per_node = 8
    device = "A100-80GB"        # a catalogue name, or a [device] table below
    memory = "40GiB"            # of each device, if not the device's own
    attention = "flash-1"       # the attention kernel that runs, if not the device's usual one
    reserve_fraction = 0.06     # of that memory, not planned with; without it, what the device's figures say
    expandable_segments = true  # as torch's allocator is set: fewer fragments
    host_memory_bytes = 1099511627776   # of one node's host, if not what the catalogue takes a usual machine to have
    engine = "async-gloo"       # what runs plans: fsdp2 (stock), async-gloo; without it, what the runtime takes there
    overlap = true              # communication runs beside compute; or the part of it that does, from 0 to 1
    unit_overhead_seconds = 0.0         # the host's time for a unit's forward, and for its backward
    collective_overhead_seconds = 0.0      # the host's time for one gather or reduction, beside the collective's own
    tensor_seconds = 0.0        # the same for every parameter that is gathered or reduced
    copy_byte_seconds = 0.0     # for every byte copied beside a collective, beyond what the memory's rate says

    [node_link]                 # inside a node: per device and direction
    bytes_per_second = 240e9
    latency_seconds = 3.4e-6

    [network]                   # between nodes: per NODE and direction
    bytes_per_second = 160e9
    latency_seconds = 9.6e-6

    [[collective]]              # a measured price replaces the model's for this kind and group
    kind = "all_gather"         # all_gather, reduce_scatter, all_reduce
    group = "world"             # world, node, across
    latency_seconds = 45e-6     # of the whole call
    bytes_per_second = 150e9    # wire bytes of one rank per second
    busy_fraction = 0.1         # the part of its seconds that the computation beside it loses, beyond `overlap`

    [[optimizer]]               # a timed step replaces the model's for this optimizer
    name = "adamw"
    tensor_seconds = 20e-6      # for every tensor that a rank holds a part of
    byte_seconds = 2e-9         # for every byte of those

    [[stage]]                   # timed kernels replace the roofline wherever a model has the same ones
    signature = "5b2e..."
    name = "model.layers.0"
    batches = [1, 2, 4]
    forward_seconds = [0.01, 0.02, 0.04]
    backward_seconds = [0.02, 0.04, 0.08]

A device that is not in the catalogue, or differs from it, is a table; `like` starts from a catalogue device,
without it every figure is needed:

    [device]
    like = "A100-80GB"
    name = "A100-PCIe"
    memory_bytes_per_second = 1935e9
    peak_flops = { bf16 = 300e12 }
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from osdp.cluster.device import Device, device
from osdp.cluster.link import Link, Measured
from osdp.cluster.measured import TimedOptimizer, TimedStage
from osdp.cluster.schema import Count, HostSeconds, MemoryBytes, Part, Reserve
from osdp.cluster.sizes import parse_bytes
from osdp.engine import STOCK, EngineName
from osdp.errors import UsageError
from osdp.files import convert, plain

if TYPE_CHECKING:
    from osdp.cluster.cluster import Cluster

_REMEDY = "correct it"
_NAMES = {"collective": "measured", "optimizer": "optimizers", "stage": "stages", "engine": "engine_name"}
"""What is named otherwise in a file, where [[collective]] is one of a list, than in a `Cluster`."""


class ClusterTable(msgspec.Struct, kw_only=True):
    """The table of a cluster; what is None is the device's own."""

    name: str = ""
    nodes: Count = 1
    devices_per_node: Count = 1
    device: str | dict[str, Any]
    memory: str | int | None = None
    memory_bytes: MemoryBytes | None = None
    attention: str | None = None
    reserve_fraction: Reserve | None = None
    overlap: bool | Part | None = None
    expandable_segments: bool = False
    unit_overhead_seconds: HostSeconds = 0.0
    collective_overhead_seconds: HostSeconds = 0.0
    tensor_seconds: HostSeconds = 0.0
    copy_byte_seconds: HostSeconds = 0.0
    engine: EngineName | None = None
    host_memory_bytes: MemoryBytes | None = None
    node_link: Link | None = None
    network: Link | None = None
    collective: tuple[Measured, ...] = ()
    optimizer: tuple[TimedOptimizer, ...] = ()
    stage: tuple[TimedStage, ...] = ()


def _device_table() -> type:
    """A device's table has the fields of `Device`, all optional beside `like`, and a memory as people write it."""
    hints = typing.get_type_hints(Device, include_extras=True)
    own = [(each.name, hints[each.name] | None, None) for each in dataclasses.fields(Device)]
    return msgspec.defstruct("DeviceTable", [("like", str | None, None), ("memory", str | int | None, None), *own])


DeviceTable: Any = _device_table()


def read_cluster(table: object) -> dict[str, Any]:
    """The fields of a `Cluster`, from its table; links, overlap and reserve default to the device's."""
    read = convert(ClusterTable, table, name="cluster", remedy=_REMEDY)
    chosen = device(read.device) if isinstance(read.device, str) else read_device(read.device)
    if read.attention is not None:
        chosen = chosen.with_attention(read.attention)
    names = [name for name in read.__struct_fields__ if name not in ("memory", "attention")]
    fields = {_NAMES.get(name, name): getattr(read, name) for name in names}
    own = {"overlap": usual_overlap(chosen, read.engine), "node_link": chosen.node_link, "network": chosen.network}
    fields |= {name: value for name, value in own.items() if fields[name] is None}
    return {**fields, "device": chosen, "memory_bytes": _memory(read.memory, read.memory_bytes, "")}


def usual_overlap(chosen: Device, engine: EngineName | None) -> float:
    """How far collectives hide on a device: not at all where stock FSDP2 waits for each of them, on CPUs."""
    return 0.0 if chosen.is_cpu and engine == STOCK.name else chosen.overlap


def read_device(table: dict[str, Any]) -> Device:
    """A device from its table: what it states, on top of `like` where that is given."""
    read = convert(DeviceTable, table, name="cluster.device", remedy=_REMEDY)
    memory_bytes = _memory(read.memory, read.memory_bytes, " in cluster.device")
    given = {key: value for key, value in table.items() if key not in ("like", "memory")}
    if memory_bytes is not None:
        given["memory_bytes"] = memory_bytes
    if read.like is not None:
        base = device(read.like).to_dict()
        merged = {key: {**base[key], **given.get(key, {})} for key in ("peak_flops", "attention_rates", "source")}
        if "attention_efficiency" in given:
            base["attention"] = ""  # stated, so of no kernel that the catalogue knows
        elif "attention" in given or "attention_rates" in given:
            kernel = given.get("attention", base["attention"])
            base["attention_efficiency"] = merged["attention_rates"].get(kernel, base["attention_efficiency"])
        given = {**base, "name": f"{base['name']} (changed)", **given, **merged}
    return convert(Device, given, name="cluster.device", remedy=_REMEDY)


def _memory(memory: str | int | None, memory_bytes: int | None, place: str) -> int | None:
    """`memory = '40GiB'` as people write it or `memory_bytes` as programs do, not both."""
    if memory is not None and memory_bytes is not None:
        raise UsageError(f"both 'memory' and 'memory_bytes' are given{place}; keep one of them")
    return memory_bytes if memory is None else parse_bytes(memory)


def cluster_table(cluster: Cluster) -> dict[str, Any]:
    """The table that reads back as this cluster, with every figure of the device: it needs no catalogue."""
    names = {field: name for name, field in _NAMES.items()}
    table = {names.get(field, field): value for field, value in plain(cluster).items()}
    return {key: table[key] for key in ("name", *table) if table[key] is not None}
