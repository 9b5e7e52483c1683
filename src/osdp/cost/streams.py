"""The nodes of a step's graph, and what they take on two streams: computing, and communicating beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.cost.seconds import ALL_GATHER, taken_seconds

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Node:
    """One thing that runs, after the nodes that it `depends` on; with `once`, in the last micro-batch only."""

    id: int
    kind: str
    name: str
    phase: str
    stage: str
    stream: str
    group: str | None
    nbytes: int
    flops: int
    seconds: float
    depends: tuple[int, ...]
    once: bool = False
    busy: float = 0.0  # what a collective takes from the computation beside it, beyond what all of them do

    @property
    def taken_seconds(self) -> float:
        return taken_seconds(self.seconds, self.busy)


class Streams:
    """A clock for each stream. Computing beside a collective, both go on at 1 / (1 + busy) of their rates.

    `busy` is what all collectives have in common: 0 is side by side, 1 one after the other.
    """

    def __init__(self, busy: float = 0.0) -> None:
        self._busy = busy
        self._main = self._reduced = 0.0
        self._wires: list[tuple[float, float, float]] = []  # a collective's start and end, and how busy it keeps
        self._place: dict[int, int] = {}  # of a node among the wires; its end may still move
        self._past = 0  # wires that ended before the computation that is next

    @property
    def end(self) -> float:
        return max(self._main, self._free)

    @property
    def _free(self) -> float:
        """When the last collective so far is done."""
        return self._wires[-1][1] if self._wires else 0.0

    def run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            ready = max(
                (self._wires[self._place[each]][1] for each in node.depends if each in self._place), default=0.0
            )
            if node.stream == COMMUNICATION:
                if node.kind != ALL_GATHER:  # its buffers wait for those of the reduction before
                    self._main = max(self._main, self._reduced)
                start = max(self._free, self._main, ready)
                self._place[node.id] = len(self._wires)
                self._wires.append((start, start + node.seconds, self._busy + node.busy))
                self._reduced = start + node.seconds if node.kind != ALL_GATHER else self._reduced
            else:
                self._compute(max(self._main, ready), node.seconds)

    def _compute(self, now: float, left: float) -> None:
        """Computes beside what is on the wires, which moves later by as much as it is slowed."""
        while self._past < len(self._wires) and self._wires[self._past][1] <= now:
            self._past += 1
        for index in range(self._past, len(self._wires)):
            start, end, busy = self._wires[index]
            if left <= 0:
                break
            alone = min(left, max(0.0, start - now))
            now, left = now + alone, left - alone
            both = min(left, max(0.0, end - max(start, now)))
            if both > 0 and now >= start:
                self._delay(index, busy * both)
                now, left = now + both * (1 + busy), left - both
        self._main = now + left

    def _delay(self, first: int, by: float) -> None:
        for index in range(first, len(self._wires)):
            start, end, busy = self._wires[index]
            self._wires[index] = (start if index == first else start + by, end + by, busy)
        self._reduced += by if self._reduced > self._wires[first][0] else 0.0
