"""Claim: on two simulated streams a step takes what its nodes say: who waits for whom, and what slows what."""

from __future__ import annotations

import pytest

from osdp.cost.seconds import ALL_GATHER, REDUCE_SCATTER
from osdp.cost.streams import COMMUNICATION, COMPUTE, Node, Streams


def node(number: int, seconds: float, *depends: int, kind: str = COMPUTE, busy: float = 0.0) -> Node:
    stream = COMPUTE if kind == COMPUTE else COMMUNICATION
    return Node(number, kind, "", "", "", stream, None, 0, 0, seconds, depends, busy=busy)


def seconds(*nodes: Node) -> float:
    streams = Streams()
    streams.run(nodes)
    return streams.end


def gather(number: int, seconds: float, *depends: int, busy: float = 0.0) -> Node:
    return node(number, seconds, *depends, kind=ALL_GATHER, busy=busy)


def reduction(number: int, seconds: float, *depends: int, busy: float = 0.0) -> Node:
    return node(number, seconds, *depends, kind=REDUCE_SCATTER, busy=busy)


def test_compute_waits_for_its_gather() -> None:
    assert seconds(gather(0, 2.0), node(1, 3.0, 0)) == 5.0


def test_a_gather_hides_behind_the_compute_before_its_own() -> None:
    assert seconds(gather(0, 2.0), gather(1, 2.0), node(2, 3.0, 0), node(3, 3.0, 1)) == 8.0


def test_a_wide_block_after_a_narrow_one_is_waited_for() -> None:
    """Its phase alone, max(5, 4), would hide the gather behind compute that needs it."""
    assert seconds(gather(0, 1.0), gather(1, 4.0), node(2, 1.0, 0), node(3, 5.0, 1)) == 10.0


def test_a_reduction_waits_for_the_one_before() -> None:
    assert seconds(node(0, 1.0), reduction(1, 4.0, 0), node(2, 1.0), reduction(3, 1.0, 2), node(4, 1.0)) == 6.0


def test_gathers_begin_when_they_are_issued() -> None:
    assert seconds(node(0, 5.0), gather(1, 2.0), node(2, 1.0, 1)) == 8.0


@pytest.mark.parametrize(("compute", "busy", "together"), [(4.0, 0.5, 6.0), (2.0, 0.5, 5.0), (6.0, 0.5, 8.0)])
def test_side_by_side_takes_the_longer_and_a_part_of_the_shorter(compute: float, busy: float, together: float) -> None:
    assert seconds(reduction(0, 4.0, busy=busy), node(1, compute)) == pytest.approx(together)


def test_what_slows_one_collective_moves_all_behind_it() -> None:
    assert seconds(gather(0, 4.0, busy=1.0), gather(1, 4.0), node(2, 2.0)) == pytest.approx(10.0)
