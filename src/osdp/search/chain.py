"""The exact answer by going through the stages from the last one to the first.

[Note: Labels]
A step goes through the stages forward and then backward, so those from some one to the last lie inside all before
it. What the outer stages need to know of an inner part's choices is little: the matrix from the clocks that enter it
forward to those that leave it backward, the bytes that it requires above what the outer stages hold, and what it holds
itself in their rows. That is a label. A label that another one is as good as in every number is dropped: whatever the
outer stages choose does no worse with the other. So of alike blocks only sums are told apart, not orders, which is
where a branch and bound takes its time.

[Note: Completions]
A label is dropped too where nothing outside can complete it to less than the best choice. Two bounds say so. Prices of
a byte turn the memory that the outer stages hold into seconds: the least of their seconds and priced bytes, for every
pair of clocks. And for the clock of the computation alone the least seconds of the outer stages are found with whole
choices, by the memory that they leave, on a grid of bytes that is rounded in their favour.

Units that act in several stages are fixed, and each of their choices is gone through. Where there are more labels than
a width, those that promise most are kept: that finds a good choice quickly, and widths grow until nothing was left out.
Bytes are whole numbers and seconds those of `evaluate`, so the answer is the problem's own, with no tolerance but that
of sums in another order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from osdp.search.chain_labels import Labels, Outside
from osdp.search.chain_tables import (
    Fixed,
    StageItems,
    all_fixed,
    count_choices,
    depends,
    passed_through,
    spanning_units,
)
from osdp.search.dominance import undominated
from osdp.search.effort import now
from osdp.search.problem import FloatArray, IntArray, Problem, StageChoice
from osdp.search.streams import CLOCKS, COMPUTE, NEVER, WIRE

INFINITY = float("inf")
_TOLERANCE = 1e-9  # relative: what two sums of the same seconds in another order may differ by
_CELLS = 1 << 15  # of the grid of bytes
_PRICED = 3  # outermost stages that the grid leaves to the prices: there the streams wait for each other
_WIDTHS = (24, 200, 3_000, 20_000, 100_000)  # labels of a stage that are kept
_CANDIDATES = 16  # times as many are compared
_TOGETHER = 3  # outermost stages whose choices are looked at together
_MOST_TOGETHER = 100_000  # of their choices
_NOTHING = -(1 << 60)  # bytes that nothing requires
_MOST_FIXED = 64  # choices of units that act in several stages
_MOST_CHOICES = 3_000  # of one stage
_PAIRS = 1 << 20  # of choices and labels that are looked at together
_MADE = 1 << 15  # of them of which labels are made together
_NO_PAIRS = np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True)
class ChainAnswer:
    """The best choice, if one beats the cutoff; the bound on the seconds of any; whether that is proven."""

    choice: tuple[StageChoice, ...] | None
    bound: float
    proven: bool
    labels: int


def is_chain(problem: Problem) -> bool:
    """Whether a problem can be gone through stage by stage: choices that can be counted, streams, one limit."""
    kinds = {id(stage.variants): stage for stage in problem.stages}.values()
    if problem.overlap <= 0 or problem.host_limit is not None or max(map(count_choices, kinds)) > _MOST_CHOICES:
        return False
    fixed = 1
    for home, unit in spanning_units(problem):
        if len(problem.stages[home].variants) > 1:
            return False
        fixed *= sum(len(option.counts) for option in problem.stages[home].variants[0].units[unit])
    return fixed <= _MOST_FIXED


class ChainSearch:
    """Can be run again when time was up: it goes on with the width at which it was."""

    def __init__(self, problem: Problem, scale: float) -> None:
        self._scale, self._width = scale, 0
        known: dict[Any, Any] = {}
        self._chains = [_Chain(problem, fixed, scale, known) for fixed in all_fixed(problem)]

    def run(self, *, cutoff: float, seconds: float, gap: float = 0.0) -> ChainAnswer:
        """The best choice that takes less than `cutoff`, with proof if these seconds of effort suffice.

        With a `gap`, only choices that are faster by more than that share are looked for.
        """
        deadline, less = now() + seconds, 1 - max(gap, _TOLERANCE)
        best: tuple[StageChoice, ...] | None = None
        to_beat, labels = cutoff * self._scale * less, 0
        while self._width < len(_WIDTHS):
            for chain in sorted(self._chains, key=lambda each: each.bound):
                if chain.bound >= to_beat or now() >= deadline:
                    break
                found = chain.run(to_beat, _WIDTHS[self._width], deadline)
                labels += chain.labels
                if found is not None:
                    best, reached = found
                    to_beat = min(to_beat, reached * less)
            if self._bound >= to_beat or now() >= deadline:
                break
            self._width += 1
        proven = self._bound >= to_beat
        return ChainAnswer(best, INFINITY if proven else self._bound / self._scale, proven, labels)

    @property
    def _bound(self) -> float:
        return min(chain.bound for chain in self._chains)


class _Chain:
    """The problem with the units fixed that act in several stages."""

    def __init__(self, problem: Problem, fixed: Fixed, scale: float, known: dict[Any, Any]) -> None:
        self._problem, self._scale, self.labels = problem, scale, 0
        self._room = problem.limit - problem.constant
        self._items: list[StageItems] = []
        for number, stage in enumerate(problem.stages):
            key = id(stage.variants), (number, *fixed.items()) if depends(stage, number, fixed) else None
            if key not in known:
                known[key] = StageItems(problem, number, fixed, scale)
            self._items.append(known[key])
        self._far = np.zeros(2 * len(self._items), np.int64)
        for (home, unit), (option, _) in fixed.items():
            far = problem.stages[home].variants[0].units[unit][option].far
            self._far += far if far is not None else 0
        self._known = known
        self._rows = [self._rows_of(number) for number in range(len(self._items))]
        self._prices = self._usual_prices()
        self._whole = self._first_stages()
        self._priced = self._outer()
        self._inside = self._inner()
        self.bound = float((self._inside[0] - self._prices * self._room).max())

    # Tables

    def _rows_of(self, number: int) -> tuple[IntArray, IntArray]:
        items, last = self._items[number], len(self._items) - 1
        lefts = self._items[number - 1].lefts if number else [(0, 0)]
        rights = self._items[number + 1].rights if number < last else [(0, 0, 0)]
        key = id(items), tuple(lefts), tuple(rights)
        if key not in self._known:
            self._known[key] = items.rows(lefts, rights)
        return self._known[key]

    def _usual_prices(self) -> FloatArray:
        """Seconds a byte at which the stages of the most frequent kind change from one choice to the next."""
        frequent = Counter(map(id, self._items)).most_common(1)[0][0]
        items = next(each for each in self._items if id(each) == frequent)
        seconds, held = items.computing, items.held.astype(float)
        at, prices = int(np.lexsort((held, seconds))[0]), [0.0]
        while len(lower := np.nonzero(held < held[at])[0]):
            each = (seconds[lower] - seconds[at]) / (held[at] - held[lower])
            prices.append(max(float(each.min()), 0.0))
            at = int(lower[np.argmin(each)])
        return np.array(sorted(set(prices)))

    def _passed(self, number: int, priced: FloatArray) -> FloatArray:
        """What the stages outside, and this one in each choice, take at least: [price, choice, from, to]."""
        items = self._items[number]
        forward, backward = items.forward.sum(axis=1), items.backward.sum(axis=1)
        entered = (priced[:, None, :, None, :] + forward[None, :, :, :, None]).max(axis=2)
        left = (entered[:, :, :, None, :] + backward[None, :, None, :, :]).max(axis=4)
        costs = items.serial[None] + self._prices[:, None] * items.held[None]
        return left + costs[:, :, None, None]

    def _first_stages(self) -> list[Outside]:
        """For each number of outer stages, the choices of these: of as many stages as there are few enough."""
        found = [Outside.nothing()]
        for items in self._items[:_TOGETHER]:
            if len(found) > 1:
                found[-1] = found[-1].undominated()
            if len(found[-1].held) * len(items) > _MOST_TOGETHER:
                break
            found.append(found[-1].extended(items))
        return found

    def _outer(self) -> list[FloatArray]:
        """For each number of outer stages, the least that they take for what is priced: [price, from, to]."""
        found = [each.priced(self._prices) for each in self._whole]
        for number in range(len(found) - 1, len(self._items)):
            found.append(self._passed(number, found[-1]).min(axis=1))
        return found

    def _inner(self) -> list[FloatArray]:
        """The same for the computation of each stage and those after it, with the last one's own rows; by price."""
        found = [np.zeros(len(self._prices))]
        for number in reversed(range(len(self._items))):
            items = self._items[number]
            costs = items.computing[None] + self._prices[:, None] * items.held[None]
            if number == len(self._items) - 1:
                costs = costs + self._prices[:, None] * np.maximum(self._own_least(number) - items.held, 0)[None]
            found.append(found[-1] + costs.min(axis=1))
        return found[::-1]

    def _own_least(self, number: int) -> IntArray:
        """The least that each choice's own rows require, whatever lies around and inside."""
        items, (forward, backward) = self._items[number], self._rows[number]
        inside = self._items[number + 1 :]
        always = sum(int(each.always.min()) for each in inside)
        both = sum(int((each.always + each.behind).min()) for each in inside)
        first = forward.min(axis=1) + self._far[number] + always
        second = backward.min(axis=(1, 2)) + self._far[-1 - number] + both
        return items.always + np.maximum(first, second)

    @cached_property
    def _least_held(self) -> list[int]:
        """What the outer stages hold at least, by their number."""
        return [0, *np.cumsum([int(each.held.min()) for each in self._items]).tolist()]

    @cached_property
    def _shift(self) -> int:
        """A cell of the grid has two to the power of this many bytes."""
        return (max(self._room, 0) // _CELLS).bit_length()

    @cached_property
    def _grid(self) -> list[FloatArray | None]:
        """For each number of outer stages, the least that they take by what the inner ones require, in cells."""
        first = min(max(_PRICED, len(self._whole) - 1), len(self._items))
        cells = np.arange((max(self._room, 0) >> self._shift) + 1)
        priced = self._priced[first][:, COMPUTE, COMPUTE]
        left = self._room - (cells << self._shift)
        table = (priced[:, None] - self._prices[:, None] * left[None]).max(axis=0)
        table = np.where(left < self._least_held[first], INFINITY, table)
        if first < len(self._whole):
            table = np.maximum(table, self._whole[first].within(left))
        found: list[FloatArray | None] = [None] * first + [table]
        chosen: dict[object, IntArray] = {}
        for number in range(first, len(self._items)):
            items, own = self._items[number], self._own_least(number)
            key = id(items), own.tobytes()
            if key not in chosen:
                chosen[key] = undominated(np.stack([items.computing, items.held, own], axis=1).astype(float))
            table = self._one_more(table, cells, items, own, chosen[key])
            found.append(table)
        return found

    def _one_more(
        self, table: FloatArray, cells: IntArray, items: StageItems, own: IntArray, chosen: IntArray
    ) -> FloatArray:
        size = len(cells)
        padded = np.append(table, INFINITY)
        found = np.full(size, INFINITY)
        for choice in chosen.tolist():
            held, least = int(items.held[choice]) >> self._shift, max(int(own[choice]) >> self._shift, 0)
            if least >= size:
                continue
            at = np.minimum(np.maximum(cells + held, least), size)
            np.minimum(found, padded[at] + items.computing[choice], out=found)
        return found

    # Labels

    def run(self, to_beat: float, width: int, deadline: float) -> tuple[tuple[StageChoice, ...], float] | None:
        """The best choice below `to_beat` among those that are kept; raises the bound to what is proven."""
        labels, history = self._begin(), []
        left_out, self.labels = INFINITY, 0
        for number in reversed(range(len(self._items))):
            made = self._extended(labels, number, to_beat, most=_CANDIDATES * width, deadline=deadline)
            if made is None:
                self.bound = max(self.bound, min(left_out, float(self._bounds(labels, number + 1).min())))
                return None
            made, bounds, more = made
            left_out = min(left_out, more)
            if not len(made):
                self.bound = max(self.bound, min(left_out, to_beat))
                return None
            rows = np.argsort(bounds, kind="stable")
            numbers = made.taken(rows).numbers(np.array(self._items[number].rights, float))
            rows = rows[np.sort(undominated(numbers))]
            if len(rows) > width:
                left_out, rows = min(left_out, float(bounds[rows[width]])), rows[:width]
            labels = made.taken(rows)
            self.labels += len(labels)
            history.append((labels.parent, labels.item))
        return self._finished(labels, history, to_beat, left_out)

    def _finished(
        self, labels: Labels, history: list[tuple[IntArray, IntArray]], to_beat: float, left_out: float
    ) -> tuple[tuple[StageChoice, ...], float] | None:
        seconds = self._bounds(labels, 0)
        at = int(np.argmin(seconds))
        reached = float(seconds[at])
        self.bound = max(self.bound, min(left_out, reached, to_beat))
        if reached >= to_beat:
            return None
        choice: list[StageChoice] = []
        for (parents, taken), items in zip(reversed(history), self._items, strict=True):
            choice.append(items.choices[int(taken[at])])
            at = int(parents[at])
        return tuple(choice), reached

    def _begin(self) -> Labels:
        """Nothing is inside: clocks stay what they are."""
        kinds = len(self._problem.micro_batches)
        matrix = np.where(np.eye(CLOCKS) > 0, 0.0, NEVER)
        none = np.zeros(1, np.int64)
        required = np.full((1, len(self._items[-1].lefts)), _NOTHING, np.int64)
        return Labels(np.tile(matrix[None, :, :, None], (kinds, 1, 1, 1)), np.zeros(1), required, *([none] * 6))

    def _bounds(self, labels: Labels, outer: int) -> FloatArray:
        """What each label takes at least, with the best of the outer stages."""
        if outer == 0:  # all kinds of micro-batches end by themselves
            ends = labels.matrices[:, (COMPUTE, COMPUTE, WIRE, WIRE), (COMPUTE, WIRE, COMPUTE, WIRE)]
            return ends.max(axis=1).sum(axis=0) + labels.serial
        together = labels.matrices.sum(axis=0)
        required = labels.required.min(axis=1)
        left = np.maximum(self._room - required, 0)
        bounds = np.full(len(labels), NEVER)
        known = np.isfinite(together).any(axis=2)
        for price, outside in zip(self._prices, self._priced[outer], strict=True):
            held = price * left
            for a, b in np.argwhere(known & np.isfinite(outside)):
                np.maximum(bounds, together[a, b] + (outside[a, b] - held), out=bounds)
        grid = self._grid[outer]
        if grid is not None:
            at = np.clip(required >> self._shift, 0, len(grid) - 1)
            np.maximum(bounds, together[COMPUTE, COMPUTE] + grid[at], out=bounds)
        return bounds + labels.serial

    def _usable(self, number: int, to_beat: float) -> IntArray:
        """The choices of a stage that may be part of something better, by the prices alone."""
        outside = self._passed(number, self._priced[number])[:, :, COMPUTE, COMPUTE]
        bounds = outside + (self._inside[number + 1] - self._prices * self._room)[:, None]
        return np.nonzero(bounds.max(axis=0) < to_beat)[0]

    def _extended(
        self, labels: Labels, number: int, to_beat: float, *, most: int, deadline: float
    ) -> tuple[Labels, FloatArray, float] | None:
        """The labels with one more stage around them that promise most, their bounds, and the least that is left out.

        Only those that may beat the best; None where time is up.
        """
        found, bounds, left_out = self._around(labels, number, *_NO_PAIRS), np.zeros(0), INFINITY
        usable = self._usable(number, to_beat)
        step = max(1, _PAIRS // len(labels))
        for first in range(0, len(usable), step):
            choice, label = self._pairs(labels, number, usable[first : first + step], to_beat)
            parts, their = [found], [bounds]
            for at in range(0, len(label), _MADE):
                if now() >= deadline:
                    return None
                made = self._around(labels, number, choice[at : at + _MADE], label[at : at + _MADE])
                reached = self._bounds(made, number)
                rows = np.nonzero(reached < to_beat)[0]
                parts.append(made.taken(rows))
                their.append(reached[rows])
            found, bounds = Labels.joined(parts), np.concatenate(their)
            if len(bounds) > most:
                rows = np.argsort(bounds, kind="stable")
                left_out = min(left_out, float(bounds[rows[most]]))
                found, bounds = found.taken(np.sort(rows[:most])), bounds[np.sort(rows[:most])]
        return found, bounds, left_out

    def _pairs(self, labels: Labels, number: int, choices: IntArray, to_beat: float) -> tuple[IntArray, IntArray]:
        """The choices and labels that fit together and may beat the best, by what is quickly said."""
        items, (forward, backward) = self._items[number], self._rows[number]
        always = labels.always + items.always[choices][:, None]
        first = always + forward[choices][:, labels.right] + self._far[number]
        second = always + labels.behind + backward[choices].min(axis=2)[:, labels.right] + self._far[-1 - number]
        inside = labels.required.T[items.left_of[choices]] + items.held[choices][:, None]
        required = np.maximum(np.maximum(first, second), inside)
        fits = required + self._least_held[number] <= self._room
        if number == 0:
            held = labels.behind + labels.stepping + self._problem.stepping
            fits &= always + held + (items.behind + items.stepping)[choices][:, None] <= self._room
        grid = self._grid[number]
        if grid is not None:  # most do not pay, and this is the quickest way to say so
            computing = labels.matrices[:, COMPUTE, COMPUTE].sum(axis=0) + labels.serial
            at = np.clip(required >> self._shift, 0, len(grid) - 1)
            fits &= computing + items.computing[choices][:, None] + grid[at] < to_beat
        choice, label = np.nonzero(fits)
        return choices[choice], label

    def _around(self, labels: Labels, number: int, choice: IntArray, label: IntArray) -> Labels:
        """Labels with a choice of a stage around them, pair by pair."""
        items, (forward, backward) = self._items[number], self._rows[number]
        right = labels.right[label]
        always = labels.always[label] + items.always[choice]
        first = always + forward[choice, right] + self._far[number]
        second = (always + labels.behind[label] + self._far[-1 - number])[:, None] + backward[choice, right]
        inside = labels.required[label, items.left_of[choice]] + items.held[choice]
        matrices = [
            passed_through(own, choice, inner[:, :, label], again)
            for own, inner, again in zip(items.forward_parts, labels.matrices, items.backward_parts, strict=True)
        ]
        return Labels(
            np.stack(matrices),
            labels.serial[label] + items.serial[choice],
            np.maximum(np.maximum(first, inside)[:, None], second),
            always,
            labels.behind[label] + items.behind[choice],
            labels.stepping[label] + items.stepping[choice],
            items.right_of[choice],
            label,
            choice,
        )
