"""What the machines' speed decides, timed in rounds.

[Note: Rounds]
Machines that are shared with others are faster in one minute than in the next: four ranks on two cores of a virtual
machine took from 535 to 755 ms for one and the same step within three minutes, all plans alike. Figures that are taken
one after the other would be of different machines. So collectives, optimizers, the engine's passes and the model's
stages are each timed once or a few times in every round, until time is up, and of all rounds the median counts. What is
run in turn is compared turn by turn: see `typical`.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from osdp.profiling.bench import Action, Bench, calls_of_a_try
from osdp.profiling.line_fit import Array, Fit, Point, settled

STEADY = 1.2  # what the upper quartile of rounds may take more than the lower one
LEAST_ROUNDS, MOST_ROUNDS = 2, 100
_SAY_SECONDS = 10.0

Case = TypeVar("Case", bound=Hashable)


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


@dataclass
class _Tries:
    """An action, called so many times a try, and the slowest rank's seconds of a call in each try."""

    action: Action
    calls: int
    amounts: tuple[float, float]
    seconds: list[float] = field(default_factory=list)


class TimedLine(Generic[Case]):
    """Actions that are each timed once in every round, and the line through their medians; see [Note: Fit]."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._tries: dict[Case, _Tries] = {}

    def admit(self, case: Case, action: Action, amounts: tuple[float, float]) -> float:
        """Takes up an action, after a warm-up; gives the seconds of one call."""
        action()
        (once,) = self._bench.slowest(self._bench.elapsed(action))
        self._tries[case] = _Tries(action, calls_of_a_try(once), amounts)
        return once

    def round(self) -> None:
        self._take(list(self._tries.values()))

    def fit(self) -> Fit:
        """By all rounds so far; what lies far off the line is timed again, as often as it was before."""
        points = {case: self._point(tries) for case, tries in self._tries.items()}
        return settled(points, self._again, late=lambda: False)

    def _again(self, case: Case) -> Point:
        tries = self._tries[case]
        for _ in range(len(tries.seconds)):
            self._take([tries])
        return self._point(tries)

    def _take(self, some: Sequence[_Tries]) -> None:
        own = []
        for tries in some:
            self._bench.together()
            own.append(self._bench.elapsed(tries.action, tries.calls) / tries.calls)
        for tries, seconds in zip(some, self._bench.slowest(*own), strict=True):
            tries.seconds.append(seconds)

    @staticmethod
    def _point(tries: _Tries) -> Point:
        return Point(tries.amounts, statistics.median(tries.seconds))


def typical(taken: Array) -> Array:
    """Typical seconds of things that were run in turn: an array of turns gives that of one turn.

    Turns are slow and fast as a whole, so what a thing takes is its part of a turn: of the parts, and of what turns
    take, the median. On machines that are steady these are the things' own medians.
    """
    turns = taken.reshape(len(taken), -1)
    whole = turns.sum(axis=1)
    return (np.median(turns / whole[:, None], axis=0) * np.median(whole)).reshape(taken.shape[1:])
