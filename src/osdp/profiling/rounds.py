"""What the machines' speed decides, timed in rounds.

[Note: Rounds]
Machines that are shared with others are faster in one minute than in the next: four ranks on two cores of a virtual
machine took from 535 to 755 ms for one and the same step within three minutes, all plans alike. Figures that are taken
one after the other would be of different machines. So the engine's passes and the model's stages are each timed a few
times in every round, until time is up, and of all rounds the median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from osdp.profiling.bench import Bench

STEADY = 1.2  # what the upper quartile of rounds may take more than the lower one
LEAST_ROUNDS, MOST_ROUNDS = 3, 100
_SAY_SECONDS = 10.0


class Part(Protocol):
    """Something that is timed in every round."""

    def round(self) -> None: ...


class Rounds:
    """Rounds of all parts, and what each round took; see [Note: Rounds]."""

    def __init__(self, bench: Bench, parts: Sequence[Part]) -> None:
        self._bench, self._parts = bench, parts
        self.seconds: list[float] = []

    def take(self) -> None:
        """One round."""
        bench = self._bench
        bench.watch(f"round {len(self.seconds) + 1}")
        bench.slowest(0.0)
        began = bench.passed_seconds
        for part in self._parts:
            part.round()
        bench.slowest(0.0)
        self.seconds.append(bench.passed_seconds - began)

    def take_all(self) -> None:
        """Rounds until the part of the bench that was begun is late."""
        said = self._bench.passed_seconds
        while self._parts and len(self.seconds) < (LEAST_ROUNDS if self._bench.late else MOST_ROUNDS):
            self.take()
            if self._bench.passed_seconds > said + _SAY_SECONDS:
                said = self._bench.passed_seconds
                self._bench.say(f"round {len(self.seconds)}, {said:.0f} of about {self._bench.budget_seconds:.0f} s")

    def unsteady(self) -> str | None:
        """A sentence where the same work took much longer in some rounds than in others."""
        if len(self.seconds) < LEAST_ROUNDS:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        if high <= STEADY * low:
            return None
        return (
            f"rounds of the same work took {low:.2g} to {high:.2g} s (the middle half of {len(self.seconds)}): "
            "something else ran on the machines, and steps will vary as much; more --seconds give a better average"
        )
