"""Clusters: nodes of devices, their memory, and what a collective between them costs.

Note [Groups]. A collective runs in one of three groups. 'world' is every rank. 'node' is the ranks of one
node. 'across' is one rank of every node; devices_per_node such groups run at the same time and share each
node's network. With one node 'world' is 'node' and 'across' has one rank; with one device a node 'world' is
'across'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from osdp.cluster.clusterfile import cluster_table, read_cluster, usual_overlap
from osdp.cluster.collective_rates import nccl_seconds, route
from osdp.cluster.device import Device, device, link_efficiency
from osdp.cluster.link import GROUPS, KINDS, Link, Measured, require_word, wire_bytes
from osdp.cluster.measured import TimedOptimizer, TimedStage
from osdp.cluster.reserve import memory_for, reserve_of
from osdp.cluster.schema import MOST_DEVICES, Count, HostSeconds, MemoryBytes, Part, Reserve
from osdp.cluster.sizes import parse_bytes
from osdp.cluster.slowest import expected_largest
from osdp.engine import ASYNC_GLOO, ENGINES, STOCK, Engine, EngineName, engine_for
from osdp.errors import UsageError
from osdp.files import check_fields, read_toml

HOST_RESERVE = 0.1  # of the host's memory: an estimate
_WORD = re.compile(r"\s*(?:(?:(\d{1,9})\s*[xX]\s*)?(\d{1,9})\s*[xX]\s*)?(\S.*?)\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines a plan is for. Make one with `Cluster.parse`, `Cluster.of` or `Cluster.from_toml`.

    `memory_bytes` replaces the device's own memory when it is not None. `node_link.bytes_per_second` is per
    device and direction, `network.bytes_per_second` per node and direction. `overlap` is the part of the shorter of
    compute and communication that overlaps the longer: 1 where all of it does, 0 where they take turns.
    Host overhead is `unit_overhead_seconds` for a unit's forward, or its backward, and
    `collective_overhead_seconds` for one gather or reduction of a unit, `tensor_seconds` for every parameter in it and
    `copy_byte_seconds`, on top of the memory's rate, for every byte that is copied beside it.
    A profile measures these, and times `stages` and `optimizers`. `engine_name` says which engine runs plans: where it
    is not given, the one that the runtime takes on such devices. `host_memory_bytes` is the memory of one node's host,
    if not what the catalogue takes a usual machine to have. `expandable_segments` says that torch's allocator is set to
    use them (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`), so that fewer fragments need room.
    """

    nodes: Count
    devices_per_node: Count
    device: Device
    memory_bytes: MemoryBytes | None = None
    node_link: Link
    network: Link
    measured: tuple[Measured, ...] = ()
    overlap: Part
    reserve_fraction: Reserve | None = None
    unit_overhead_seconds: HostSeconds = 0.0
    collective_overhead_seconds: HostSeconds = 0.0
    tensor_seconds: HostSeconds = 0.0
    copy_byte_seconds: HostSeconds = 0.0
    stages: tuple[TimedStage, ...] = ()
    optimizers: tuple[TimedOptimizer, ...] = ()
    name: str = ""
    engine_name: EngineName | None = None
    host_memory_bytes: MemoryBytes | None = None
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        if self.engine_name is None:
            object.__setattr__(self, "engine_name", engine_for(is_cpu=self.device.is_cpu).name)
        if isinstance(self.overlap, bool):
            object.__setattr__(self, "overlap", float(self.overlap))
        check_fields(self, remedy="correct the cluster")
        if self.world_size > MOST_DEVICES:
            raise UsageError(f"the cluster has {self.world_size:,} devices; give at most {MOST_DEVICES:,}")
        if self.limit_bytes < 1:
            raise UsageError(
                f"of {self.total_bytes} bytes of memory nothing is left beside the reserve of"
                f" {sum(self.reserve.values())}; give more memory, e.g. '40GiB'"
            )
        pairs = [(each.kind, each.group) for each in self.measured]
        twice = sorted({f"{kind} in {group}" for kind, group in pairs if pairs.count((kind, group)) > 1})
        if twice:
            raise UsageError(f"{', '.join(twice)} is measured twice; keep one entry for each kind and group")

    @classmethod
    def of(
        cls,
        device_name: str | Device,
        *,
        nodes: int = 1,
        devices_per_node: int = 1,
        memory: str | int | None = None,
        node_link: Link | None = None,
        network: Link | None = None,
        measured: Iterable[Measured] = (),
        overlap: float | None = None,
        reserve_fraction: float | None = None,
        name: str = "",
        engine_name: EngineName | None = None,
        attention: str | None = None,
    ) -> Cluster:
        """A cluster of one kind of device; what is not given is the device's own."""
        chosen = device(device_name) if isinstance(device_name, str) else device_name
        if attention is not None:
            chosen = chosen.with_attention(attention)
        return cls(
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=chosen,
            memory_bytes=None if memory is None else parse_bytes(memory),
            node_link=chosen.node_link if node_link is None else node_link,
            network=chosen.network if network is None else network,
            measured=tuple(measured),
            overlap=usual_overlap(chosen, engine_name) if overlap is None else overlap,
            reserve_fraction=reserve_fraction,
            name=name,
            engine_name=engine_name,
        )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """'2x8xA100-80GB' (nodes x devices x device), '8xRTX-TITAN', 'A100-80GB', or the path of a .toml."""
        if text.strip().lower().endswith(".toml"):
            return cls.from_toml(text.strip())
        match = _WORD.fullmatch(text)
        if match is None:
            raise UsageError("the cluster is an empty text; write it as '2x8xA100-80GB' or give a .toml file")
        return cls.of(match[3], nodes=int(match[1] or 1), devices_per_node=int(match[2] or 1))

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """A cluster file; its form is at the top of `osdp.cluster.clusterfile`."""
        table = read_toml(path, remedy="give a cluster file in TOML or a word such as '8xA100-80GB'")
        try:
            return cls.from_dict(table)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, table: object) -> Cluster:
        """What `to_dict` gave, or a table as in a cluster file."""
        return cls(**read_cluster(table))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with every figure of the device: reading it back needs no catalogue."""
        return cluster_table(self)

    def to_toml(self) -> str:
        """The text of a cluster file that reads back equal."""
        return tomli_w.dumps(self.to_dict())

    def with_network(self, peak_bytes_per_second: float) -> Cluster:
        """The same with another network between nodes: per node and direction, as a data sheet says.

        Collectives reach the same part of it as of the device's usual network.
        """
        if self.nodes == 1:
            raise UsageError(f"{self.label} is one node, which has no network; give a cluster such as '2x8xA100-80GB'")
        if any(each.group != "node" for each in self.measured):
            raise UsageError(f"the network of {self.label} was measured; change its file, or leave the network out")
        rate = peak_bytes_per_second * link_efficiency(self.network.name)
        named = f"{peak_bytes_per_second * 8 / 1e9:g} Gbit/s"
        return replace(self, network=replace(self.network, bytes_per_second=rate, name=named))

    def with_attention(self, kernel: str) -> Cluster:
        """The same where attention runs in another kernel: 'flash-1' as in runs of 2023, 'cudnn' on Hopper."""
        return replace(self, device=self.device.with_attention(kernel))

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def has_two_levels(self) -> bool:
        """Whether what is exchanged over the world may go across nodes and through each node in two steps.

        On gloo, where that is ours to choose; NCCL has its own way.
        """
        return self.engine == ASYNC_GLOO and self.nodes > 1 and self.devices_per_node > 1

    @property
    def total_bytes(self) -> int:
        """The memory of one device, or what was given in its place."""
        return self.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def limit_bytes(self) -> int:
        """What a plan may use of one device: its memory without the reserve, rounded down."""
        return self.total_bytes - sum(self.reserve.values())

    @property
    def reserve(self) -> dict[str, int]:
        """Bytes of one device that are not planned with, by what takes them: see `osdp.cluster.reserve`."""
        return self._reserve(self.total_bytes)

    @property
    def _reserve(self) -> partial[dict[str, int]]:
        """The reserve of any memory; see [Note: Reserve]."""
        own = {"communicators": self.communicators, "fraction": self.reserve_fraction}
        return partial(reserve_of, self.device, **own, expandable=self.expandable_segments)

    @property
    def communicators(self) -> int:
        """Process groups that a rank may take part in: the world's, its node's and the one across nodes."""
        if self.world_size == 1:
            return 0
        return 3 if self.nodes > 1 and self.devices_per_node > 1 else 1

    @property
    def can_offload(self) -> bool:
        """Whether units may be held on the host: stock FSDP2 moves them, and the host is known."""
        return self.device.knows_host and self.engine == STOCK

    @property
    def host_total_bytes(self) -> int:
        """The memory of one node's host."""
        usual = self.device.host_memory_bytes * self.devices_per_node
        return usual if self.host_memory_bytes is None else self.host_memory_bytes

    @property
    def host_limit_bytes(self) -> int:
        """What units on the host may take of one node's memory: the system, the data and each process need some."""
        return self.host_total_bytes - int(self.host_total_bytes * HOST_RESERVE)

    def host_seconds(self, total_bytes: float) -> float:
        """Seconds in which a rank's share of the host's memory reads or writes so many bytes."""
        return total_bytes / self.device.host_memory_bytes_per_second

    def host_copy_seconds(self, total_bytes: float) -> float:
        """Seconds in which a device sends so many bytes to the host, or gets them from there."""
        return total_bytes / self.device.host_bytes_per_second

    def with_limit(self, limit_bytes: int) -> Cluster:
        """The same cluster with the least memory that has this limit."""
        return replace(self, memory_bytes=memory_for(limit_bytes, self._reserve))

    @property
    def slowest_factor(self) -> float:
        """How much longer the slowest of all devices computes than the mean one; see `Device.speed_spread`."""
        return 1 + self.device.speed_spread * expected_largest(self.world_size)

    @property
    def word(self) -> str:
        """The cluster's shape as `parse` reads it: '2x8xA100-80GB', '8xA100-80GB' or 'A100-80GB'."""
        if self.nodes > 1:
            return f"{self.nodes}x{self.devices_per_node}x{self.device.name}"
        return f"{self.devices_per_node}x{self.device.name}" if self.devices_per_node > 1 else self.device.name

    @property
    def label(self) -> str:
        """What to call it in print: its name, or its shape if it has none."""
        return self.name or self.word

    def group_size(self, group: str) -> int:
        """Ranks in one group; see Note [Groups]."""
        require_word("group", group, GROUPS)
        if group == "world":
            return self.world_size
        return self.devices_per_node if group == "node" else self.nodes

    def collective_seconds(self, kind: str, group: str, total_bytes: float) -> float:
        """Seconds of one collective over `total_bytes`, the full (unsharded) size; 0.0 in a group of one.

        Between accelerators as NCCL does it, see [Note: NCCL]. Between CPUs an alpha-beta ring, n ranks, H nodes of D
        devices, S = total_bytes:

            all_gather = reduce_scatter = latency + (n-1)/n * S / B,    all_reduce = 2 * all_gather

        B, the rate of the ring's slowest edge:
          node    node_link: every rank sends to its neighbour in the node.
          across  network / D: D such groups share the node's network at the same time.
          world   min(node_link, network): a ring visits each node's ranks in turn and leaves the node once,
                  so that one crossing has the whole network. With D = 1 no edge is in a node: network.

        Latency: D-1 hops in the node, then ceil(log2 H) between nodes:
          node  a*(D-1)      across  A*ceil(log2 H)      world  a*(D-1) + A*ceil(log2 H)
        A flat ring would pay A for every node; at thousands of ranks libraries go over to trees and
        hierarchies for short messages, so that cost would be a fiction. For H = 2 both agree.

        A `Measured` entry of this kind and group replaces latency and rate: latency + wire_bytes / rate.
        """
        require_word("collective", kind, KINDS)
        ranks = self.group_size(group)
        if not total_bytes >= 0:
            raise UsageError(f"a collective over {total_bytes!r} bytes is impossible; give 0 or more")
        if ranks == 1:
            return 0.0
        measured = self._measured(kind, group)
        if measured is not None:
            return measured.latency_seconds + wire_bytes(kind, ranks, total_bytes) / measured.bytes_per_second
        if not self.device.is_cpu:
            way = route(group, self.nodes, self.devices_per_node, self.node_link, self.network)
            return nccl_seconds(kind, total_bytes, way, self.node_link, self.network)
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * self._latency_seconds(group) + wire_bytes(kind, ranks, total_bytes) / self._rate(group)

    def copy_seconds(self, total_bytes: float) -> float:
        """Seconds of the copies beside a collective that move so many bytes."""
        return self.device.memory_seconds(total_bytes) + total_bytes * self.copy_byte_seconds

    @property
    def engine(self) -> Engine:
        """What runs a plan's collectives: gloo's are carried out beside the computation by the runtime itself."""
        assert self.engine_name is not None
        return ENGINES[self.engine_name]

    def busy_fraction(self, kind: str, group: str) -> float:
        """What a collective takes from the computation beside it, beyond `overlap`: as measured, or the device's."""
        if not self.overlap:
            return 0.0
        measured = self._measured(kind, group)
        return self.device.busy_fraction if measured is None else measured.busy_fraction

    def timed_stage(self, signature: str) -> TimedStage | None:
        """The stage with these kernels, where a profile timed it."""
        return next((each for each in self.stages if each.signature == signature), None)

    def timed_optimizer(self, name: str) -> TimedOptimizer | None:
        return next((each for each in self.optimizers if each.name == name), None)

    def _latency_seconds(self, group: str) -> float:
        inside = 0 if group == "across" else self.devices_per_node - 1
        between = 0 if group == "node" else (self.nodes - 1).bit_length()  # ceil(log2(nodes))
        return inside * self.node_link.latency_seconds + between * self.network.latency_seconds

    def _rate(self, group: str) -> float:
        if group == "node" or self.nodes == 1:
            return self.node_link.bytes_per_second
        if group == "across" or self.devices_per_node == 1:
            return self.network.bytes_per_second / self.devices_per_node
        return min(self.node_link.bytes_per_second, self.network.bytes_per_second)

    def _measured(self, kind: str, group: str) -> Measured | None:
        """The measurement of this group, or of another name of the same ranks; see Note [Groups]."""
        same = [group]
        if self.nodes == 1:
            same += ["node", "world"]
        elif self.devices_per_node == 1:
            same += ["across", "world"]
        for name in same:
            for each in self.measured:
                if each.kind == kind and each.group == name:
                    return each
        return None
