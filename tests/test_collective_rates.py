"""Collectives between accelerators cost what NCCL's do.

A ring pays for every rank and node, a tree for their logarithm; short messages take the protocol with little latency,
long ones that with the full rate; groups across nodes share the network; more bytes or nodes never cost less.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.cluster import KINDS, Cluster, Link, Measured

NODE, NETWORK = Link(100e9, 2e-6), Link(40e9, 10e-6)


def accelerators(nodes: int, devices_per_node: int) -> Cluster:
    return Cluster.of("A100-80GB", nodes=nodes, devices_per_node=devices_per_node, node_link=NODE, network=NETWORK)


# By hand for 8e9 bytes, 4 nodes of 8; at that size Simple is fastest, with 8.4e-6 to start:
#   node    7 steps of 2e-6;                     7/8 * 8e9 over 100e9
#   across  3 steps of 10e-6;                    3/4 * 8e9 over 40e9 / 8
#   world   28 steps of 2e-6, 3 of 10e-6;        31/32 * 8e9 over 40e9
@pytest.mark.parametrize(
    ("group", "seconds"),
    [("node", 8.4e-6 + 14e-6 + 0.07), ("across", 8.4e-6 + 30e-6 + 1.2), ("world", 8.4e-6 + 86e-6 + 0.19375)],
)
def test_long_messages_run_on_a_ring_at_the_rate_of_its_slowest_edge(group: str, seconds: float) -> None:
    cluster = accelerators(4, 8)
    assert cluster.collective_seconds("all_gather", group, 8e9) == pytest.approx(seconds, rel=1e-12)
    assert cluster.collective_seconds("reduce_scatter", group, 8e9) == pytest.approx(seconds, rel=1e-12)


def test_short_messages_take_the_protocol_with_the_least_latency() -> None:
    # LL: 6.6e-6 to start and 0.18 of 7 steps of 2e-6, at half the rate.
    seconds = accelerators(1, 8).collective_seconds("all_gather", "node", 8000)
    assert seconds == pytest.approx(6.6e-6 + 0.18 * 14e-6 + 2 * 7000 / 100e9, rel=1e-12)


def test_the_rate_grows_with_the_message_and_falls_with_the_ranks() -> None:
    def rate(nodes: int, size: float) -> float:
        cluster = Cluster.of("H100-80GB", nodes=nodes, devices_per_node=8)
        return size / cluster.collective_seconds("all_gather", "world", size)

    rates = [rate(1, size) for size in (1e6, 1e7, 1e8, 1e9)]
    assert rates == sorted(rates)
    assert rates[0] < 0.2 * rates[-1]
    by_nodes = [rate(nodes, 2e9) for nodes in (1, 2, 8, 32, 64)]
    assert by_nodes == sorted(by_nodes, reverse=True)
    assert 340e9 < by_nodes[0] < 420e9  # 360 GB/s were reported on 8, times 8/7 of the bytes
    assert 180e9 < by_nodes[3] < 270e9  # 200 GB/s were reported on 256


def test_a_gather_pays_for_every_node_and_a_reduction_of_all_for_their_logarithm() -> None:
    def seconds(kind: str, nodes: int) -> float:
        return accelerators(nodes, 1).collective_seconds(kind, "world", 8)

    gathers = [seconds("all_gather", nodes) for nodes in (129, 257)]
    assert gathers[1] - gathers[0] == pytest.approx(0.18 * 128 * 10e-6, rel=1e-3)
    reductions = [seconds("all_reduce", nodes) for nodes in (128, 256)]
    assert reductions[1] - reductions[0] == pytest.approx(0.18 * 2 * 10e-6, rel=1e-3)


@given(st.sampled_from(KINDS), st.integers(1, 64), st.integers(1, 8), st.floats(0, 1e12))
def test_more_bytes_or_nodes_never_cost_less(kind: str, nodes: int, per_node: int, size: float) -> None:
    here, more = accelerators(nodes, per_node), accelerators(nodes + 1, per_node)
    for group in ("world", "across"):
        assert here.collective_seconds(kind, group, size) <= here.collective_seconds(kind, group, 2 * size)
        assert here.collective_seconds(kind, group, size) <= more.collective_seconds(kind, group, size) * (1 + 1e-12)


@given(st.sampled_from(KINDS), st.integers(2, 64), st.floats(0, 1e12))
def test_names_of_the_same_ranks_cost_the_same(kind: str, count: int, size: float) -> None:
    one_node, spread = accelerators(1, count), accelerators(count, 1)
    assert one_node.collective_seconds(kind, "world", size) == one_node.collective_seconds(kind, "node", size)
    assert spread.collective_seconds(kind, "world", size) == spread.collective_seconds(kind, "across", size)
    assert one_node.collective_seconds(kind, "across", size) == spread.collective_seconds(kind, "node", size) == 0.0


def test_collectives_keep_the_device_busy_unless_measured_or_never_beside_compute() -> None:
    cluster = accelerators(2, 8)
    assert cluster.busy_fraction("all_gather", "world") == cluster.device.busy_fraction > 0
    measured = replace(cluster, measured=(Measured("all_gather", "world", 1e-5, 1e11, 0.5),))
    assert measured.busy_fraction("all_gather", "world") == 0.5
    assert measured.collective_seconds("all_gather", "world", 0) == 1e-5
    assert replace(cluster, overlap=0.0).busy_fraction("all_gather", "world") == 0.0
    assert Cluster.of("CPU", devices_per_node=8).busy_fraction("all_gather", "world") == 0.0
