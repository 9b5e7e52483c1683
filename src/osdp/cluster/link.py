"""What joins devices: a link's price, and a collective's price where it was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from msgspec import Meta

from osdp.cluster.schema import PerSecond, Seconds
from osdp.errors import UsageError
from osdp.files import check_fields

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives a plan uses."""

GROUPS = ("world", "node", "across")
"""Who takes part: every rank; the ranks of one node; one rank of every node."""


def require_word(what: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the known ones."""
    if value not in known:
        raise UsageError(f"{what} {value!r} is not known; use one of {', '.join(known)}")


def wire_bytes(kind: str, ranks: int, total_bytes: float) -> float:
    """Bytes each rank sends in a ring over `total_bytes` of unsharded data.

    In an all-gather every rank owns S/n and must receive the other n-1 parts, passing each on once:
    (n-1)/n * S. A reduce-scatter is the same ring run backwards. An all-reduce is one after the other.
    This is also the least any algorithm without in-network reduction can send.
    """
    once = (ranks - 1) / ranks * total_bytes
    return 2 * once if kind == "all_reduce" else once


@dataclass(frozen=True)
class Link:
    """A connection as the alpha-beta model sees it: a message of S bytes takes latency + S / rate.

    As a `node_link` the rate is per device and direction; as a `network` it is per node and direction,
    shared by the node's devices. The rate is what collectives reach, not the datasheet's.
    """

    bytes_per_second: PerSecond
    latency_seconds: Seconds
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, remedy="give a link's bytes per second, e.g. 25e9, and seconds, e.g. 5e-6")


@dataclass(frozen=True)
class Measured:
    """One collective's measured price: seconds = latency_seconds + wire_bytes / bytes_per_second.

    `latency_seconds` is the whole call's, not one hop's: it replaces the model's latency and rate together.
    `busy_fraction` is the part of its seconds that the computation beside it loses, beyond what the cluster's `overlap`
    says of all collectives.
    """

    kind: str
    group: str
    latency_seconds: Seconds
    bytes_per_second: PerSecond
    busy_fraction: Annotated[float, Meta(ge=0, le=1e6)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, remedy="profile again")
        require_word("collective kind", self.kind, KINDS)
        require_word("collective group", self.group, GROUPS)


Price = TypeVar("Price", Link, Measured)


def slower(price: Price, factor: float) -> Price:
    """The same when everything takes so many times as long."""
    return replace(
        price,
        latency_seconds=price.latency_seconds * factor,
        bytes_per_second=price.bytes_per_second / factor,
    )
