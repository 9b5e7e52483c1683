"""The slots of a stage's passes as rows of the search's tables: what a unit holds there, and which are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout
from osdp.cost.lifetimes import forward_issue, reduction_end
from osdp.cost.positions import Allocation, Places, Position
from osdp.cost.training import Training
from osdp.model.graph import IntArray
from osdp.search.problem import CrossStageUnit, Rows, UnitOption


@dataclass(frozen=True)
class Slots:
    stage_passes: tuple[int, int]
    lengths: tuple[int, int]


def value_at(allocations: Sequence[Allocation], position: Position) -> int:
    return sum(hold.nbytes for hold in allocations if hold.start <= position < hold.end)


def pass_bytes(allocations: Sequence[Allocation], stage_pass: int, length: int, always: int) -> IntArray:
    """Bytes of a unit beyond `always` in every slot of a pass."""
    change = np.zeros(length + 1, dtype=np.int64)
    for hold in allocations:
        begin = (
            0
            if hold.start.stage_pass < stage_pass
            else hold.start.slot
            if hold.start.stage_pass == stage_pass
            else length
        )
        end = length if hold.end.stage_pass > stage_pass else hold.end.slot if hold.end.stage_pass == stage_pass else 0
        if begin < end:
            change[min(begin, length)] += hold.nbytes
            change[min(end, length)] -= hold.nbytes
    return change.cumsum()[:length] - always


def is_before_last(places: Places, layout: Layout) -> bool:
    """Whether a unit of the first stage is gathered in vain by the stage after it: as if backward came to use it."""
    last = layout.stage_pass(0, backward=True)
    is_first = places.enter is not None and places.enter.stage_pass == 0 and places.leave_backward is None
    return is_first and places.issue_backward is not None and places.issue_backward.stage_pass == last - 1


def neighbour_flags(
    layout: Layout, slots: Slots, training: Training, cluster: Cluster
) -> list[tuple[IntArray, IntArray, IntArray]]:
    """For both passes: the slots with the next stage's gather, those of its issue, and those with a reduction."""
    issues: list[list[Position]] = [[], []]
    reduced: list[Position] = []
    for places in layout.places:
        again = places.enter_backward
        if again is None and is_before_last(places, layout):
            again = Position(layout.stage_pass(0, backward=True), 0)
        for which, (issue, enter) in enumerate(
            ((forward_issue(places, cluster), places.enter), (places.issue_backward, again))
        ):
            if (
                issue is None or enter is None or issue.stage_pass < enter.stage_pass - 1
            ):  # far ahead: it has rows of its own
                continue
            if issue.stage_pass <= slots.stage_passes[which] < enter.stage_pass:
                issues[which].append(issue)
        left = places.leave_backward
        end = reduction_end(places, training, cluster)
        if left is not None and not places.late and left.stage_pass < slots.stage_passes[1] <= end.stage_pass:
            reduced.append(end)
    flags = []
    for which, length in enumerate(slots.lengths):
        tail, issue, head = (np.zeros(length, dtype=np.int64) for _ in range(3))
        for position in issues[which]:
            inside = position.stage_pass == slots.stage_passes[which]
            tail[position.slot if inside else 0 :] = 1
            if inside:
                issue[position.slot] = 1
        if which == 1:
            for position in reduced:
                head[: position.slot if position.stage_pass == slots.stage_passes[1] else length] = 1
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
