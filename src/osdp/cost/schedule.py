"""The schedule of a step: what FSDP2's hooks do at every mark of the trace, as typed events in issue order.

One pass over the marks makes it. The collectives of a step, the two streams' clocks, the search's time rows and the
positions from which memory lifetimes follow are read off these events.

[Note: Issue order]
Where a unit is entered, its gather is issued unless it was already, then those that it issues ahead (see [Note:
Prefetch] in osdp.cost.gather_order). Where backward leaves a unit, it is reduced. The slices of a split operator are
pieces of their own that take turns: in forward the first one first, in backward the last one first, each reduced
before the one before it is reached. A whole unit that has no gradient for its inputs, an embedding, is left when
backward has ended.

A unit that is called several times is freed and gathered again with every call in forward; backward gathers it once,
and it is reduced when the last of its calls is left. Each call issues the next unit's gather, in both directions,
whether or not that unit is used again, unless backward is done with it. A unit of several modules is entered with its
first, and left once all have run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from osdp.cost.gather_order import Place, backward_gathers, backward_order, forward_gathers
from osdp.cost.layout import Layout
from osdp.cost.units import Option, Unit
from osdp.engine import Engine
from osdp.model.graph import Mark, Segment
from osdp.sharding import FREE, REPLICATE, ShardingMode


class Do(Enum):
    """What an event does."""

    GATHER = "gather"  # the unsharded parameters are asked for, from what is held always
    GATHER_BACKWARD = "gather_again"  # from what forward left behind
    ENTER = "enter"  # computation needs the unsharded parameters: it waits for the gather and copies them out
    ENTER_BACKWARD = "enter_backward"  # the same in backward, or in a second forward
    COMPUTE = "compute"  # the kernels of a stage's pass, from one mark to another
    REDUCE = "reduce"  # gradients are copied in, and their reduction begins


class CollectiveRecord(NamedTuple):
    """One collective as it is issued: `nbytes` is the full, unsharded size, as `Cluster.collective_seconds` has it."""

    kind: str
    group: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes:,} bytes in {self.group}"


def group_name(ranks: Sequence[int], world_size: int, devices_per_node: int) -> str | None:
    """The group that has these ranks, of several names the first: world, node, across. None for a rank alone."""
    if len(ranks) == 1:
        return None
    if len(ranks) == world_size:
        return "world"
    return "node" if len(ranks) == devices_per_node and ranks[-1] - ranks[0] < devices_per_node else "across"


@dataclass(frozen=True, eq=False)
class Piece:
    """What one gather brings in: a unit, or one slice of it, with its place among the layout's units.

    A slice's `unit` has the slice's share of the parameters.
    """

    index: int
    unit: Unit
    mode: ShardingMode
    slice: int = 0


@dataclass(frozen=True)
class Event:
    """One event of a stage's pass: of a `piece`, or the computation of `segments` (the first, and behind the last)."""

    do: Do
    stage_pass: int
    piece: Piece | None = None
    segments: tuple[int, int] = (0, 0)


def pieces_of(units: Sequence[Unit], options: Sequence[Option]) -> list[list[Piece]]:
    """The pieces of every unit, in the order of forward."""
    found = []
    for index, (unit, option) in enumerate(zip(units, options, strict=True)):
        if option.slices == 1:
            found.append([Piece(index, unit, option.mode)])
            continue
        sharded = option.sharded if option.mode.is_sharded else 0
        modes = [option.mode] * sharded + [REPLICATE] * (option.slices - sharded)
        found.append([Piece(index, _slice(unit, option.slices, s), mode, s) for s, mode in enumerate(modes)])
    return found


def _slice(unit: Unit, slices: int, index: int) -> Unit:
    """One slice of an operator, cut as osdp.runtime.split does: as equal as can be, the larger ones first."""
    cut = []
    for parameter in unit.parameters:
        at = unit.split_dim if len(parameter.shape) > 1 else 0
        size = parameter.shape[at] // slices + (index < parameter.shape[at] % slices)
        cut.append(replace(parameter, shape=(*parameter.shape[:at], size, *parameter.shape[at + 1 :])))
    return replace(unit, parameters=tuple(cut))


def schedule(layout: Layout, options: Sequence[Option], engine: Engine) -> list[Event]:
    """The events of one micro-batch, in issue order; see [Note: Issue order]."""
    walk = _Walk(layout, options, engine)
    for number, (stage_pass, segment, mark) in enumerate(walk.marks):
        walk.at(stage_pass, segment)
        if mark.name in walk.unit_of and mark.kind != "gradient":
            act = walk.forward if stage_pass < len(layout.staged) else walk.backward
            act(walk.unit_of[mark.name], mark, number)
    walk.finish()
    return walk.events


def full_schedule(layout: Layout, engine: Engine) -> list[Event]:
    """The schedule with every event that any option can have: nothing is split, and all is freed after forward."""
    return schedule(layout, [Option(FREE)] * len(layout.units), engine)


class _Walk:
    """What is gathered while the marks of a step are gone through."""

    def __init__(self, layout: Layout, options: Sequence[Option], engine: Engine) -> None:
        self.pieces = pieces_of(layout.units, options)
        self.events: list[Event] = []
        self.marks = _marks(layout)
        self.stage_pass = self._segment = self._computed = 0
        self._lengths = [len(segments) for segments in _passes(layout)]
        self._engine = engine
        self.unit_of = {name: index for index, unit in enumerate(layout.units) for name in unit.modules}
        self._modules = [set(unit.modules) for unit in layout.units]
        self._gathered: set[Piece] = set()
        self._done: set[Piece] = set()  # left by backward
        self._held: set[Piece] = set()  # entered by backward or a second forward
        self._freed: set[Piece] = set()  # after forward, by modes that then hold less than a copy
        self._inside: dict[int, set[str]] = {}  # units that forward has entered, with the modules that have yet to run
        self._closed: set[str] = set()  # modules that were the last of their units to run: backward reaches these there
        self._reached: set[int] = set()
        turn = next(number for number, (stage_pass, _, _) in enumerate(self.marks) if stage_pass >= len(layout.staged))
        backward = [mark for _, _, mark in self.marks[turn:]]
        self._leave_backward = self._last_leaves(turn)
        self._awaited = self._awaited_units(backward)
        self._calls = Counter(mark.name for mark in backward if mark.kind == "enter" and not mark.recomputed)
        entered = sorted((place.enter, index) for index, place in enumerate(layout.places) if place.enter is not None)
        units = [layout.units[index] for _, index in entered]
        left = [self.unit_of[unit.name] for unit in backward_order(units)]

        def place(piece: Piece) -> Place:
            return layout.place_of(piece.index)

        self._next = forward_gathers([piece for _, index in entered for piece in self.pieces[index]], place)
        self._next_back = backward_gathers([piece for index in left for piece in reversed(self.pieces[index])], place)

    def at(self, stage_pass: int, segment: int) -> None:
        """Moves on to a segment: those before it have been computed once the next event comes."""
        if stage_pass != self.stage_pass:
            self._compute(self._lengths[self.stage_pass])
            self.stage_pass, self._computed = stage_pass, 0
        self._segment = segment

    def finish(self) -> None:
        for stage_pass in range(self.stage_pass, len(self._lengths)):
            self.at(stage_pass, 0)
            self._compute(self._lengths[stage_pass])

    def _compute(self, stop: int) -> None:
        if stop > self._computed:
            self.events.append(Event(Do.COMPUTE, self.stage_pass, None, (self._computed, stop)))
            self._computed = stop

    def _emit(self, do: Do, piece: Piece) -> None:
        self._compute(self._segment)
        self.events.append(Event(do, self.stage_pass, piece))

    def _last_leaves(self, turn: int) -> dict[int, int]:
        """Units, each with the mark at which backward leaves the last of its modules."""
        return {
            self.unit_of[mark.name]: number
            for number, (_, _, mark) in enumerate(self.marks)
            if number >= turn and mark.kind == "leave" and not mark.recomputed and mark.name in self.unit_of
        }

    def _awaited_units(self, backward: Sequence[Mark]) -> Counter[int]:
        """Units that backward reaches before the second forward that it needs: the last ones of recomputed blocks.

        Each with the number of calls in that second forward.
        """
        reached: set[str] = set()
        found: Counter[int] = Counter()
        for mark in backward:
            if mark.kind == "enter" and mark.recomputed and mark.name in reached and mark.name in self.unit_of:
                found[self.unit_of[mark.name]] += 1
            elif mark.kind == "enter" and not mark.recomputed:
                reached.add(mark.name)
        return found

    def forward(self, index: int, mark: Mark, number: int) -> None:
        pieces = self.pieces[index]
        if mark.kind == "enter" and index not in self._inside:  # of several modules the first one prefetches
            self._inside[index] = set(self._modules[index])
            ahead = pieces[0] in self._gathered  # its own was issued by the unit before
            for piece in pieces:
                self._gather(piece)
                following = self._next.get(piece, ())
                if ahead and len(pieces) == 1 and self._engine.gathers_before_waiting:
                    self._prefetch(following)
                self._emit(Do.ENTER_BACKWARD if piece in self._freed else Do.ENTER, piece)
                self._prefetch(following)
                if len(pieces) > 1:
                    self._free_unless_kept(piece)
        elif mark.kind == "leave" and index in self._inside:
            self._inside[index].discard(mark.name)
            if not self._inside[index]:
                del self._inside[index]
                self._closed.add(mark.name)
                for piece in pieces:
                    self._free_unless_kept(piece)

    def backward(self, index: int, mark: Mark, number: int) -> None:
        pieces = self.pieces[index]
        if mark.kind == "enter" and mark.recomputed:
            self._second_forward(index)
        elif mark.kind == "enter" and mark.name in self._closed:
            self._reached.add(index)
            self._reach(pieces[-1])
            self._calls[mark.name] -= 1
            if not self._awaited[index]:
                self._go_back(index)
        elif number == self._leave_backward.get(index) and (len(pieces) == 1 or index not in self._reached):
            for piece in pieces:  # of several only if no gradient reached the unit: see [Note: Left at the end]
                self._reduce(piece)

    def _second_forward(self, index: int) -> None:
        """A second forward issues as the first did, but for the piece whose backward has begun."""
        for piece in self.pieces[index]:
            self._gather(piece)
            self._enter_backward(piece)
            if index not in self._reached or piece is not self.pieces[index][-1]:
                self._prefetch(self._next.get(piece, ()))
        if self._awaited[index]:
            self._awaited[index] -= 1
            if not self._awaited[index]:
                self._go_back(index)

    def _reach(self, piece: Piece) -> None:
        self._gather(piece)
        self._enter_backward(piece)
        self._prefetch(self._next_back.get(piece, ()))

    def _enter_backward(self, piece: Piece) -> None:
        """Backward waits for a gather once: it stays until it is reduced."""
        if piece not in self._held:
            self._held.add(piece)
            self._emit(Do.ENTER_BACKWARD, piece)

    def _go_back(self, index: int) -> None:
        """The backward of slices, the last of which is reached: each is reduced before the one before it is reached."""
        pieces = self.pieces[index]
        for piece in reversed(pieces) if len(pieces) > 1 else ():
            if piece is not pieces[-1]:
                self._reach(piece)
            if not any(self._calls[name] for name in self._modules[index]):
                self._reduce(piece)

    def _prefetch(self, pieces: Sequence[Piece]) -> None:
        """Gathers pieces that follow, unless this backward is done with them."""
        for piece in pieces:
            if piece not in self._done:
                self._gather(piece)

    def _gather(self, piece: Piece) -> None:
        if piece not in self._gathered:
            self._gathered.add(piece)
            self._emit(Do.GATHER_BACKWARD if piece in self._freed else Do.GATHER, piece)

    def _free_unless_kept(self, piece: Piece) -> None:
        if not piece.mode.is_kept:
            self._gathered.discard(piece)
            self._freed.add(piece)

    def _reduce(self, piece: Piece) -> None:
        self._gathered.discard(piece)
        self._freed.discard(piece)
        self._done.add(piece)
        self._emit(Do.REDUCE, piece)


def _passes(layout: Layout) -> list[tuple[Segment, ...]]:
    """The segments of every pass of a step, by pass."""
    passes = [staged.trace.forward for staged in layout.staged]
    return passes + [staged.trace.backward for staged in reversed(layout.staged)]


def _marks(layout: Layout) -> list[tuple[int, int, Mark]]:
    """The marks of a step, each with its pass and the segment that it opens."""
    return [
        (stage_pass, number, segment.mark)
        for stage_pass, segments in enumerate(_passes(layout))
        for number, segment in enumerate(segments)
    ]
