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

from osdp.search.chain_tables import Fixed, StageItems, all_fixed, count_choices, depends, spanning_units
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
_NOTHING = -(1 << 60)  # bytes that nothing requires
_MOST_FIXED = 64  # choices of units that act in several stages
_MOST_CHOICES = 3_000  # of one stage
_DECIMALS = 10  # of scaled seconds, when labels are compared


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


@dataclass
class _Labels:
    """One row of every array for each label; `parent` and `item` say how it was made."""

    matrices: FloatArray  # [label, micro-batches, from, to]
    serial: FloatArray
    required: IntArray  # by what the stage before holds in this one: [label, left]
    always: IntArray
    behind: IntArray
    stepping: IntArray
    right: IntArray  # what the innermost stage's neighbour sees
    parent: IntArray
    item: IntArray

    def __len__(self) -> int:
        return len(self.serial)

    def taken(self, rows: IntArray) -> _Labels:
        return _Labels(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @staticmethod
    def joined(parts: list[_Labels]) -> _Labels:
        names = _Labels.__dataclass_fields__
        return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def numbers(self, rights: FloatArray) -> FloatArray:
        """Everything in which a label can be better than another one, the most telling first."""
        count = len(self)
        held = self.always + self.behind
        bytes_ = [self.required.min(axis=1), held, self.always, held + self.stepping]
        waits = self.matrices.reshape(count, self.matrices.shape[1], -1)
        parts = [waits[:, 0] + self.serial[:, None], *(waits[:, kind] for kind in range(1, waits.shape[1]))]
        seconds = self.matrices[:, :, COMPUTE, COMPUTE].sum(axis=1) + self.serial
        table = np.concatenate(
            [seconds[:, None], np.stack(bytes_, axis=1), self.required, rights[self.right], *parts], axis=1
        )
        table = np.where(np.isfinite(table), np.round(table, _DECIMALS), table)
        return table[:, (table != table[:1]).any(axis=0)]


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

    def _outer(self) -> list[FloatArray]:
        """For each number of outer stages, the least that they take for what is priced: [price, from, to]."""
        priced = np.full((len(self._prices), CLOCKS, CLOCKS), NEVER)
        for a in (COMPUTE, WIRE):
            for b in (COMPUTE, WIRE):
                priced[:, a, b] = 0.0
        found = [priced]
        for number in range(len(self._items)):
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
    def _cell(self) -> int:
        return max(1, -(-self._room // _CELLS))

    @cached_property
    def _grid(self) -> list[FloatArray | None]:
        """For each number of outer stages, the least that they take by what the inner ones require, in cells."""
        first = min(_PRICED, len(self._items))
        cells = np.arange(max(self._room, 0) // self._cell + 1)
        priced = self._priced[first][:, COMPUTE, COMPUTE]
        left = self._room - cells * self._cell
        table = (priced[:, None] - self._prices[:, None] * left[None]).max(axis=0)
        table = np.where(left < self._least_held[first], INFINITY, table)
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
            held, least = int(items.held[choice]) // self._cell, max(int(own[choice]) // self._cell, 0)
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
            if now() >= deadline:
                self.bound = max(self.bound, min(left_out, float(self._bounds(labels, number + 1).min())))
                return None
            made = self._extended(labels, number, to_beat)
            if made is None:
                self.bound = max(self.bound, min(left_out, to_beat))
                return None
            made, bounds = made
            rows = np.argsort(bounds, kind="stable")
            if len(rows) > _CANDIDATES * width:
                left_out, rows = min(left_out, float(bounds[rows[_CANDIDATES * width]])), rows[: _CANDIDATES * width]
            numbers = made.taken(rows).numbers(np.array(self._items[number].rights, float))
            rows = rows[np.sort(undominated(numbers))]
            if len(rows) > width:
                left_out, rows = min(left_out, float(bounds[rows[width]])), rows[:width]
            labels = made.taken(rows)
            self.labels += len(labels)
            history.append((labels.parent, labels.item))
        return self._finished(labels, history, to_beat, left_out)

    def _finished(
        self, labels: _Labels, history: list[tuple[IntArray, IntArray]], to_beat: float, left_out: float
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

    def _begin(self) -> _Labels:
        """Nothing is inside: clocks stay what they are."""
        kinds = len(self._problem.micro_batches)
        matrix = np.where(np.eye(CLOCKS) > 0, 0.0, NEVER)
        none = np.zeros(1, np.int64)
        required = np.full((1, len(self._items[-1].lefts)), _NOTHING, np.int64)
        return _Labels(np.tile(matrix, (1, kinds, 1, 1)), np.zeros(1), required, *([none] * 6))

    def _bounds(self, labels: _Labels, outer: int) -> FloatArray:
        """What each label takes at least, with the best of the outer stages."""
        together = labels.matrices.sum(axis=1)
        required = labels.required.min(axis=1)
        priced = np.full(len(labels), NEVER)
        for price, outside in zip(self._prices, self._priced[outer], strict=True):
            seconds = (together + outside[None]).reshape(len(labels), -1).max(axis=1)
            np.maximum(priced, seconds - price * np.maximum(self._room - required, 0), out=priced)
        if outer == 0:  # all kinds of micro-batches end by themselves
            ends = labels.matrices[:, :, (COMPUTE, COMPUTE, WIRE, WIRE), (COMPUTE, WIRE, COMPUTE, WIRE)]
            return ends.max(axis=2).sum(axis=1) + labels.serial
        grid = self._grid[outer]
        if grid is not None:
            at = np.clip(required // self._cell, 0, len(grid) - 1)
            np.maximum(priced, together[:, COMPUTE, COMPUTE] + grid[at], out=priced)
        return priced + labels.serial

    def _usable(self, number: int, to_beat: float) -> list[int]:
        """The choices of a stage that may be part of something better, by the prices alone."""
        items = self._items[number]
        outside = self._passed(number, self._priced[number])[:, :, COMPUTE, COMPUTE]
        bounds = outside + (self._inside[number + 1] - self._prices * self._room)[:, None]
        return np.nonzero(bounds.max(axis=0) < to_beat)[0].tolist() if len(items) else []

    def _extended(self, labels: _Labels, number: int, to_beat: float) -> tuple[_Labels, FloatArray] | None:
        """All labels with one more stage around them that may beat the best, and their bounds."""
        parts, bounds = [], []
        for choice in self._usable(number, to_beat):
            made = self._around(labels, number, choice, to_beat)
            if made is None:
                continue
            found = self._bounds(made, number)
            rows = np.nonzero(found < to_beat)[0]
            if len(rows):
                parts.append(made.taken(rows))
                bounds.append(found[rows])
        return (_Labels.joined(parts), np.concatenate(bounds)) if parts else None

    def _around(self, labels: _Labels, number: int, choice: int, to_beat: float) -> _Labels | None:
        """The labels with this choice of a stage around them, as far as they fit."""
        items, (forward, backward) = self._items[number], self._rows[number]
        always = labels.always + items.always[choice]
        first = always + forward[choice][labels.right] + self._far[number]
        second = (always + labels.behind + self._far[-1 - number])[:, None] + backward[choice][labels.right]
        inside = labels.required[:, items.left_of[choice]] + items.held[choice]
        required = np.maximum(np.maximum(first, inside)[:, None], second)
        behind, stepping = labels.behind + items.behind[choice], labels.stepping + items.stepping[choice]
        fits = required.min(axis=1) + self._least_held[number] <= self._room
        if number == 0:
            fits &= always + behind + stepping + self._problem.stepping <= self._room
        grid = self._grid[number]
        if grid is not None:  # most do not pay, and this is the quickest way to say so
            computing = labels.matrices[:, :, COMPUTE, COMPUTE].sum(axis=1) + labels.serial + items.computing[choice]
            at = np.clip(required.min(axis=1) // self._cell, 0, len(grid) - 1)
            fits &= computing + grid[at] < to_beat
        rows = np.nonzero(fits)[0]
        if not len(rows):
            return None
        matrices = (items.forward[choice][None, :, :, :, None] + labels.matrices[rows][:, :, None, :, :]).max(axis=3)
        matrices = (matrices[:, :, :, :, None] + items.backward[choice][None, :, None, :, :]).max(axis=3)
        return _Labels(
            matrices,
            labels.serial[rows] + items.serial[choice],
            required[rows],
            always[rows],
            behind[rows],
            stepping[rows],
            np.full(len(rows), items.right_of[choice]),
            rows,
            np.full(len(rows), choice),
        )
