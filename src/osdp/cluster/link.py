"""What joins devices: a link's price, and a collective's price where it was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from osdp.errors import UsageError

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives a plan uses."""

GROUPS = ("world", "node", "across")
"""Who takes part: every rank; the ranks of one node; one rank of every node."""


def require_positive(what: str, value: float, remedy: str) -> None:
    """Refuse a figure that would make a time infinite, zero or negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{what} is {value!r} but must be a finite number above 0; {remedy}")


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

    bytes_per_second: float
    latency_seconds: float
    name: str = ""

    def __post_init__(self) -> None:
        require_positive("link bytes_per_second", self.bytes_per_second, "give bytes per second, e.g. 25e9")
        latency = self.latency_seconds
        if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 0 <= latency < math.inf:
            raise UsageError(f"link latency_seconds is {latency!r} but must be 0 or more; give seconds, e.g. 5e-6")

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes_per_second": self.bytes_per_second,
            "latency_seconds": self.latency_seconds,
            "name": self.name,
        }


@dataclass(frozen=True)
class Measured:
    """One collective's measured price: seconds = latency_seconds + wire_bytes / bytes_per_second.

    `latency_seconds` is the whole call's, not one hop's: it replaces the model's latency and rate together.
    `busy_fraction` is the part of its seconds that the computation beside it loses, beyond what the cluster's `overlap`
    says of all collectives.
    """

    kind: str
    group: str
    latency_seconds: float
    bytes_per_second: float
    busy_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_word("collective kind", self.kind, KINDS)
        require_word("collective group", self.group, GROUPS)
        Link(self.bytes_per_second, self.latency_seconds)
        if not self.busy_fraction >= 0:
            raise UsageError(f"busy_fraction is {self.busy_fraction!r} but must be at least 0; profile again")

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "group": self.group,
            "latency_seconds": self.latency_seconds,
            "bytes_per_second": self.bytes_per_second,
            "busy_fraction": self.busy_fraction,
        }


Price = TypeVar("Price", Link, Measured)


def slower(price: Price, factor: float) -> Price:
    """The same when everything takes so many times as long."""
    return replace(
        price,
        latency_seconds=price.latency_seconds * factor,
        bytes_per_second=price.bytes_per_second / factor,
    )
