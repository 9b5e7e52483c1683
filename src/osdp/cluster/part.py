"""The part of a cluster that one dimension of a larger layout has; see [Note: Outer layout] in osdp.cost.outer."""

from __future__ import annotations

from dataclasses import replace

from osdp.cluster.cluster import Cluster
from osdp.cluster.link import Link, Measured
from osdp.cluster.slowest import expected_largest
from osdp.errors import UsageError


def local_cluster(cluster: Cluster, tensor: int, pipeline: int) -> Cluster:
    """The ranks of one stage's data-parallel dimension, with their share of the network.

    What a profile timed stays where it holds: stages of blocks that no operator of is divided, and collectives of
    groups that the part has too. Other collectives go by the links, at the rates that the profile found for them.
    """
    each, nodes = cluster.devices_per_node, cluster.nodes
    if each % tensor:
        raise UsageError(
            f"{tensor} tensor-parallel ranks do not divide the {each} devices of a node; give a divisor of {each}"
        )
    if nodes % pipeline == 0:
        nodes, here = nodes // pipeline, each // tensor
    elif pipeline % nodes == 0 and (each // tensor) % (pipeline // nodes) == 0:
        nodes, here = 1, each // tensor // (pipeline // nodes)
    else:
        raise UsageError(
            f"{pipeline} stages of {tensor} ranks do not divide {cluster.word}; give a divisor of its nodes, or a"
            " multiple that divides the devices of each"
        )
    spread, ranks = cluster.device.speed_spread, nodes * here
    if ranks > 1:
        spread *= expected_largest(cluster.world_size) / expected_largest(ranks)
    linked = with_measured_links(cluster)
    if ranks == 1 and pipeline > 1:  # a stage on one rank is one unit; see `_whole` in osdp.runtime.apply
        linked = replace(linked, unit_overhead_seconds=0.0)
    network = replace(linked.network, bytes_per_second=linked.network.bytes_per_second * here / each)
    return replace(
        linked,
        nodes=nodes,
        devices_per_node=here,
        network=network,
        device=replace(cluster.device, speed_spread=spread),
        stages=cluster.stages if tensor == 1 else (),
        measured=_still_true(cluster, nodes, here, tensor),
        name="",
    )


def node_of(cluster: Cluster, ranks: int) -> Cluster:
    """So many ranks of one node, as a cluster of their own."""
    linked = with_measured_links(cluster)
    measured = _still_true(cluster, 1, ranks, 1)
    return replace(linked, nodes=1, devices_per_node=ranks, measured=measured, stages=())


def _still_true(cluster: Cluster, nodes: int, here: int, tensor: int) -> tuple[Measured, ...]:
    """Measurements of groups with the same ranks, as many of them at once."""
    at_once = here * tensor  # groups across nodes
    groups = {
        "node": here == cluster.devices_per_node,
        "across": (nodes, at_once) == (cluster.nodes, cluster.devices_per_node),
    }
    return tuple(each for each in cluster.measured if groups.get(each.group, False))


def with_measured_links(cluster: Cluster) -> Cluster:
    """The same with the links that its measured gathers had, for what was not measured itself."""
    nodes, each = cluster.nodes, cluster.devices_per_node
    gathers = {m.group: m for m in cluster.measured if m.kind == "all_gather"}
    inside = gathers.get("node") or (gathers.get("world") if nodes == 1 else None)
    between = gathers.get("across") or (gathers.get("world") if each == 1 else None)
    if inside is not None and each > 1:
        cluster = replace(cluster, node_link=_link(inside, cluster.node_link, hops=each - 1, sharing=1))
    if between is not None and nodes > 1:
        hops = (nodes - 1).bit_length()
        cluster = replace(cluster, network=_link(between, cluster.network, hops=hops, sharing=each))
    return cluster


def _link(measured: Measured, link: Link, *, hops: int, sharing: int) -> Link:
    """A link as a gather over so many hops found it, `sharing` of them at the same time."""
    rate, latency = measured.bytes_per_second * sharing, measured.latency_seconds / hops
    return replace(link, bytes_per_second=rate, latency_seconds=latency)
