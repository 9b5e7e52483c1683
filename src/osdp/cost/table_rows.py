"""The slots of a stage's visits as rows of the search's tables: what a unit holds there, and which are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout
from osdp.cost.lifetimes import Allocation, Places, Position, forward_issue, reduction_end
from osdp.cost.training import Training
from osdp.model.graph import IntArray
from osdp.search.problem import CrossStageUnit, Rows, UnitOption


@dataclass(frozen=True)
class Slots:
    visits: tuple[int, int]
    lengths: tuple[int, int]


def value_at(allocations: Sequence[Allocation], position: Position) -> int:
    return sum(hold.nbytes for hold in allocations if hold.start <= position < hold.end)


def visit_bytes(allocations: Sequence[Allocation], visit: int, length: int, always: int) -> IntArray:
    """Bytes of a unit beyond `always` in every slot of a visit."""
    change = np.zeros(length + 1, dtype=np.int64)
    for hold in allocations:
        begin = 0 if hold.start.visit < visit else hold.start.slot if hold.start.visit == visit else length
        end = length if hold.end.visit > visit else hold.end.slot if hold.end.visit == visit else 0
        if begin < end:
            change[min(begin, length)] += hold.nbytes
            change[min(end, length)] -= hold.nbytes
    return change.cumsum()[:length] - always


def is_before_last(places: Places, layout: Layout) -> bool:
    """Whether a unit of the first stage is gathered in vain by the stage after it: as if backward came to use it."""
    last = layout.visit(0, backward=True)
    is_first = places.enter is not None and places.enter.visit == 0 and places.leave_again is None
    return is_first and places.issue_again is not None and places.issue_again.visit == last - 1


def neighbour_flags(
    layout: Layout, slots: Slots, training: Training, cluster: Cluster
) -> list[tuple[IntArray, IntArray, IntArray]]:
    """For both visits: the slots with the next stage's gather, those of its issue, and those with a reduction."""
    issues: list[list[Position]] = [[], []]
    reduced: list[Position] = []
    for places in layout.places:
        again = places.enter_again
        if again is None and is_before_last(places, layout):
            again = Position(layout.visit(0, backward=True), 0)
        for which, (issue, enter) in enumerate(
            ((forward_issue(places, cluster), places.enter), (places.issue_again, again))
        ):
            if issue is None or enter is None or issue.visit < enter.visit - 1:  # far ahead: it has rows of its own
                continue
            if issue.visit <= slots.visits[which] < enter.visit:
                issues[which].append(issue)
        left = places.leave_again
        end = reduction_end(places, training, cluster)
        if left is not None and not places.late and left.visit < slots.visits[1] <= end.visit:
            reduced.append(end)
    flags = []
    for which, length in enumerate(slots.lengths):
        tail, issue, head = (np.zeros(length, dtype=np.int64) for _ in range(3))
        for position in issues[which]:
            inside = position.visit == slots.visits[which]
            tail[position.slot if inside else 0 :] = 1
            if inside:
                issue[position.slot] = 1
        if which == 1:
            for position in reduced:
                head[: position.slot if position.visit == slots.visits[1] else length] = 1
        flags.append((tail, issue, head))
    return flags


@dataclass(frozen=True)
class SlotGroups:
    """Slots that differ in nothing but their activations are one row, at their highest."""

    first: IntArray  # one slot of every group
    member: IntArray  # the group of every slot
    tail: IntArray
    issue: IntArray
    head: IntArray
    features: IntArray

    @staticmethod
    def of(
        options: Sequence[Sequence[UnitOption]],
        cross_stage_units: Sequence[CrossStageUnit],
        growths: Sequence[IntArray],
        which: int,
        flags: tuple[IntArray, IntArray, IntArray],
    ) -> SlotGroups:
        columns = [option.backward if which else option.forward for unit in options for option in unit]
        columns += [rows for guest in cross_stage_units for rows in (guest.backward if which else guest.forward)]
        features = np.concatenate([*columns, *growths, *(flag[:, None] for flag in flags)], axis=1)
        _, first, member = np.unique(features, axis=0, return_index=True, return_inverse=True)
        tail, issue, head = (flag[first] for flag in flags)
        return SlotGroups(first, member.reshape(-1), tail, issue, head, features[first])

    def rows(self, activations: IntArray) -> tuple[Rows, IntArray]:
        """The rows at given activations, without those that another row exceeds in everything; and which they are."""
        highest = np.full(len(self.first), np.iinfo(np.int64).min)
        np.maximum.at(highest, self.member, activations)
        full = np.concatenate([highest[:, None], self.features], axis=1)
        kept: list[int] = []
        for index in np.argsort(-full.sum(axis=1, dtype=np.float64), kind="stable"):
            if not kept or not (full[kept] >= full[index]).all(axis=1).any():
                kept.append(int(index))
        chosen = np.array(kept, dtype=np.int64)
        flags = [flag[chosen].astype(bool) for flag in (self.tail, self.issue, self.head)]
        return Rows(highest[chosen], *flags), chosen
