"""Parts of a step with their choices made, many at once: inner ones and outer ones; see [Note: Labels]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from osdp.search.chain_tables import StageItems
from osdp.search.dominance import undominated
from osdp.search.problem import FloatArray, IntArray
from osdp.search.streams import CLOCKS, COMPUTE, NEVER, WIRE

_DECIMALS = 10  # of scaled seconds, when labels are compared


@dataclass
class Labels:
    """One entry of every array for each label; `parent` and `item` say how it was made."""

    matrices: FloatArray  # [micro-batches, from, to, label]
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

    def taken(self, rows: IntArray) -> Labels:
        first, *others = (getattr(self, name) for name in self.__dataclass_fields__)
        return Labels(first[..., rows], *(each[rows] for each in others))

    @staticmethod
    def joined(parts: list[Labels]) -> Labels:
        first, *others = ([getattr(part, name) for part in parts] for name in Labels.__dataclass_fields__)
        return Labels(np.concatenate(first, axis=-1), *map(np.concatenate, others))

    def numbers(self, rights: FloatArray) -> FloatArray:
        """Everything in which a label can be better than another one, the most telling first."""
        held = self.always + self.behind
        bytes_ = [self.required.min(axis=1), held, self.always, held + self.stepping, *self.required.T]
        waits = self.matrices.reshape(len(self.matrices), -1, len(self))
        parts = [waits[0] + self.serial, *waits[1:]]
        seconds = self.matrices[:, COMPUTE, COMPUTE].sum(axis=0) + self.serial
        table = np.concatenate([seconds[None], np.stack(bytes_), rights[self.right].T, *parts])
        table = np.where(np.isfinite(table), np.round(table, _DECIMALS), table)
        return table[(table != table[:, :1]).any(axis=1)].T


@dataclass
class Outside:
    """Whole choices of the first stages, one entry of every array for each: all but their rows."""

    forward: FloatArray  # [choices, clock]: from the start of a micro-batch, all kinds of them together
    backward: FloatArray  # to its end
    serial: FloatArray
    held: IntArray

    @staticmethod
    def nothing() -> Outside:
        ends = np.full((1, CLOCKS), NEVER)
        ends[:, (COMPUTE, WIRE)] = 0.0
        return Outside(ends, ends, np.zeros(1), np.zeros(1, np.int64))

    @property
    def computing(self) -> FloatArray:
        return self.forward[:, COMPUTE] + self.backward[:, COMPUTE] + self.serial

    def extended(self, items: StageItems) -> Outside:
        """All of these with each choice of one more stage."""
        forward, backward = items.forward.sum(axis=1), items.backward.sum(axis=1)
        entered = (self.forward[:, None, :, None] + forward[None]).max(axis=2)
        left = (backward[None] + self.backward[:, None, None, :]).max(axis=3)
        return Outside(
            entered.reshape(-1, CLOCKS),
            left.reshape(-1, CLOCKS),
            (self.serial[:, None] + items.serial).ravel(),
            (self.held[:, None] + items.held).ravel(),
        )

    def undominated(self) -> Outside:
        """Those that no other one is as good as in everything."""
        parts = self.computing[:, None], self.held[:, None], self.forward + self.serial[:, None], self.backward
        table = np.concatenate(parts, axis=1)
        table = np.where(np.isfinite(table), np.round(table, _DECIMALS), table)
        rows = undominated(table[:, (table != table[:1]).any(axis=0)])
        return Outside(self.forward[rows], self.backward[rows], self.serial[rows], self.held[rows])

    def priced(self, prices: FloatArray) -> FloatArray:
        """The least that any takes for what is priced, for every pair of clocks: [price, from, to]."""
        seconds = self.forward[:, :, None] + self.backward[:, None, :] + self.serial[:, None, None]
        return np.stack([(seconds + (price * self.held)[:, None, None]).min(axis=0) for price in prices])

    def within(self, room: IntArray) -> FloatArray:
        """The least that any takes that holds no more than this."""
        order = np.argsort(self.held, kind="stable")
        least = np.append(np.inf, np.minimum.accumulate(self.computing[order]))
        return least[np.searchsorted(self.held[order], room, side="right")]
