"""The order in which a step's collectives are issued: what FSDP2's hooks do at every mark, gone through once.

[Note: Issue order]
Where a unit is entered, its gather is issued unless it was already, then that of the unit after it (see [Note:
Prefetch] in osdp.cost.holds). Where backward leaves a unit, it is reduced. The slices of a split operator are pieces of
their own that take turns: in forward the first one first, in backward the last one first, each reduced before the one
before it is reached. A whole unit that has no gradient for its inputs, an embedding, is left when backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

from osdp.cost.layout import Layout
from osdp.cost.units import Option, Unit, is_kept
from osdp.model.graph import Mark
from osdp.planfile import REPLICATE, backward_order

GATHER, GATHER_AGAIN, REDUCE = "gather", "gather_again", "reduce"


class Issued(NamedTuple):
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
    mode: str
    slice: int = 0


@dataclass(frozen=True)
class Issue:
    """A piece's collectives, issued in a visit: its first gather, its second one, or its reduction."""

    visit: int
    piece: Piece
    what: str


def pieces_of(units: Sequence[Unit], options: Sequence[Option]) -> list[list[Piece]]:
    """The pieces of every unit, in the order of forward."""
    found = []
    for index, (unit, option) in enumerate(zip(units, options, strict=True)):
        if option.slices == 1:
            found.append([Piece(index, unit, option.mode)])
            continue
        sharded = 0 if option.mode == REPLICATE else option.sharded
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


def issue_order(layout: Layout, options: Sequence[Option]) -> list[Issue]:
    """All that one micro-batch issues, in order; see [Note: Issue order]."""
    walk = _Walk(layout, options)
    for number, (visit, mark) in enumerate(walk.marks):
        if mark.name in walk.unit_of:
            walk.visit = visit
            act = walk.forward if visit < len(layout.shaped) else walk.backward
            act(walk.unit_of[mark.name], mark, number)
    return walk.issues


class _Walk:
    """What is gathered while the marks of a step are gone through."""

    def __init__(self, layout: Layout, options: Sequence[Option]) -> None:
        self.pieces = pieces_of(layout.units, options)
        self.issues: list[Issue] = []
        self.visit = 0
        self.marks = _marks(layout)
        self.unit_of = {name: index for index, unit in enumerate(layout.units) for name in unit.modules}
        self._gathered: set[Piece] = set()
        self._inside: set[int] = set()  # units of which forward has entered a module, and not yet left the last
        self._reached: set[int] = set()
        turn = next(number for number, (visit, _) in enumerate(self.marks) if visit >= len(layout.shaped))
        self._leave = self._last_leaves(range(turn))
        self._leave_again = self._last_leaves(range(turn, len(self.marks)))
        self._interrupted = self._interrupted_units(range(turn, len(self.marks)))
        entered = sorted((place.enter, index) for index, place in enumerate(layout.places) if place.enter is not None)
        units = [layout.units[index] for _, index in entered]
        left = [self.unit_of[unit.name] for unit in backward_order(cast(Any, units))]
        self._next = dict(pairwise(piece for _, index in entered for piece in self.pieces[index]))
        self._next_back = dict(pairwise(piece for index in left for piece in reversed(self.pieces[index])))

    def _last_leaves(self, numbers: range) -> dict[int, int]:
        """Units, each with the mark at which the last of its modules is left."""
        marks = ((number, self.marks[number][1]) for number in numbers)
        return {
            self.unit_of[mark.name]: number
            for number, mark in marks
            if mark.kind == "leave" and not mark.again and mark.name in self.unit_of
        }

    def _interrupted_units(self, numbers: range) -> set[int]:
        """Units that backward reaches before the second forward that it needs: the last ones of recomputed blocks."""
        reached: set[str] = set()
        found: set[int] = set()
        for mark in (self.marks[number][1] for number in numbers):
            if mark.kind == "enter" and mark.again and mark.name in reached and mark.name in self.unit_of:
                found.add(self.unit_of[mark.name])
            elif mark.kind == "enter":
                reached.add(mark.name)
        return found

    def forward(self, index: int, mark: Mark, number: int) -> None:
        pieces = self.pieces[index]
        if mark.kind == "enter" and index not in self._inside:  # of several modules the first one prefetches
            self._inside.add(index)
            for piece in pieces:
                self._gather(piece, GATHER)
                self._gather(self._next.get(piece), GATHER)
                if len(pieces) > 1:
                    self._free_unless_kept(piece)
        elif number == self._leave.get(index):
            self._inside.discard(index)
            for piece in pieces:
                self._free_unless_kept(piece)

    def backward(self, index: int, mark: Mark, number: int) -> None:
        pieces = self.pieces[index]
        if mark.kind == "enter" and mark.again:
            self._second_forward(index)
        elif mark.kind == "enter" and index not in self._reached:
            self._reached.add(index)
            self._reach(pieces[-1])
            if index not in self._interrupted:
                self._go_back(index)
        elif number == self._leave_again.get(index) and len(pieces) == 1:
            self._reduce(pieces[0])

    def _second_forward(self, index: int) -> None:
        """A second forward issues as the first did within its block, but for the piece whose backward has begun."""
        for piece in self.pieces[index]:
            self._gather(piece, GATHER_AGAIN)
            following = self._next.get(piece)
            if following is None or following.unit.block != piece.unit.block:
                continue
            if index not in self._reached or piece is not self.pieces[index][-1]:
                self._gather(following, GATHER_AGAIN)
        if index in self._reached:
            self._go_back(index)

    def _reach(self, piece: Piece) -> None:
        self._gather(piece, GATHER_AGAIN)
        self._gather(self._next_back.get(piece), GATHER_AGAIN)

    def _go_back(self, index: int) -> None:
        """The backward of slices, the last of which is reached: each is reduced before the one before it is reached."""
        pieces = self.pieces[index]
        for piece in reversed(pieces) if len(pieces) > 1 else ():
            if piece is not pieces[-1]:
                self._reach(piece)
            self._reduce(piece)

    def _gather(self, piece: Piece | None, what: str) -> None:
        if piece is not None and piece not in self._gathered:
            self._gathered.add(piece)
            self.issues.append(Issue(self.visit, piece, what))

    def _free_unless_kept(self, piece: Piece) -> None:
        if not is_kept(piece.mode):
            self._gathered.discard(piece)

    def _reduce(self, piece: Piece) -> None:
        self._gathered.discard(piece)
        self.issues.append(Issue(self.visit, piece, REDUCE))


def _marks(layout: Layout) -> list[tuple[int, Mark]]:
    """The marks of a step, each with its visit."""
    passes = [shaped.trace.forward for shaped in layout.shaped]
    passes += [shaped.trace.backward for shaped in reversed(layout.shaped)]
    return [(visit, stretch.mark) for visit, stretches in enumerate(passes) for stretch in stretches]
