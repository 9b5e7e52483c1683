"""What a collective takes on NCCL, by message size, ranks and level.

[Note: NCCL]
All-gather and reduce-scatter run on rings: n ranks take n - 1 steps, of which H - 1 cross between the H nodes and the
rest stay inside. Every step has its hop's latency, so short messages get slower with every rank. An all-reduce is two
rings, or a tree: down and up a chain inside each node and log2 H levels between nodes.

A message goes by the protocol that is fastest for its size. Simple sends whole chunks and waits for each; LL128 puts a
flag into every 128 bytes and LL one beside every 4, which costs rate and saves latency. Latencies in the catalogue are
those of Simple; the others are stated as parts of them.

The rate is that of the slowest edge: inside a node each rank's link, between nodes the node's network. A ring through
all nodes leaves each node once, so its one crossing has the whole network; D groups across nodes share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from osdp.cluster.link import Link, wire_bytes


@dataclass(frozen=True)
class _Protocol:
    start_seconds: float  # of a call
    latency: float  # part of Simple's
    rate: float  # part of the link's


# NVIDIA/nccl src/graph/tuning.cc, ring: start 8.4, 14.0 and 6.6 µs, NVLink hops 3.4, 1.9 and 0.6 µs; the rates are the
# data's share of what is sent: all, 120 of 128 bytes, 4 of 8.
_PROTOCOLS = (_Protocol(8.4e-6, 1.0, 1.0), _Protocol(14.0e-6, 0.56, 0.9375), _Protocol(6.6e-6, 0.18, 0.5))
_TREE_RATE = 0.92  # of a ring's, in the same file


@dataclass(frozen=True)
class Route:
    """A group of ranks on the wires: steps inside nodes and between them, and the slowest edge's rate."""

    ranks: int
    inside: int
    between: int
    tree_inside: int
    tree_between: int
    bytes_per_second: float


def route(group: str, nodes: int, devices_per_node: int, node_link: Link, network: Link) -> Route:
    """How a group's ring and tree go; see Note [Groups] in osdp.cluster.cluster."""
    if group == "node" or nodes == 1:
        steps = devices_per_node - 1
        return Route(devices_per_node, steps, 0, steps, 0, node_link.bytes_per_second)
    levels = (nodes - 1).bit_length()  # ceil(log2(nodes))
    if group == "across" or devices_per_node == 1:
        return Route(nodes, 0, nodes - 1, 0, levels, network.bytes_per_second / devices_per_node)
    ranks = nodes * devices_per_node
    rate = min(node_link.bytes_per_second, network.bytes_per_second)
    return Route(ranks, ranks - nodes, nodes - 1, devices_per_node - 1, levels, rate)


def nccl_seconds(kind: str, total_bytes: float, way: Route, node_link: Link, network: Link) -> float:
    """Seconds of one collective over `total_bytes`, the unsharded size, at the fastest protocol; see [Note: NCCL]."""
    passes = 2 if kind == "all_reduce" else 1
    ring = way.inside * node_link.latency_seconds + way.between * network.latency_seconds
    tree = way.tree_inside * node_link.latency_seconds + way.tree_between * network.latency_seconds
    moving = wire_bytes(kind, way.ranks, total_bytes) / way.bytes_per_second
    ways = [(passes * ring, moving)]
    if kind == "all_reduce":
        ways.append((2 * tree, moving / _TREE_RATE))
    return min(
        protocol.start_seconds + latency * protocol.latency + seconds / protocol.rate
        for latency, seconds in ways
        for protocol in _PROTOCOLS
    )
