"""Where in training a rank is, so that ranks that are not at one place know it.

[Note: Place]
A rank that leaves out a micro-batch or a step alone is ahead of the others from then on. Where sizes agree, its
collectives still meet theirs: they would mix gradients and weights of two steps without a word. So with what ranks tell
each other at the end of every backward (see [Note: Unused]) each says how many steps its optimizers have made, and at
which micro-batch it is: four bytes in a collective that is there anyway. It carries the largest of every byte, so each
number goes together with what it lacks to 255: only where all ranks have the same number do the two largest add up to
that.
"""

from __future__ import annotations

from collections.abc import Sequence

from osdp.errors import OsdpError

LEFT = 255  # the loop was left, and what it has not reduced is reduced now
_MOST = 255  # of a byte


class Place:
    """The steps of a model's optimizers, counted, and the micro-batch of `osdp.accumulate` that runs, from 0."""

    def __init__(self) -> None:
        self.steps = self.micro_batch = 0
        self._refusal: str | None = None

    def codes(self) -> list[int]:
        """See [Note: Place]."""
        steps, micro_batch = self.steps % (_MOST + 1), min(self.micro_batch, LEFT)
        return [steps, _MOST - steps, micro_batch, _MOST - micro_batch]

    def compare(self, largest: Sequence[int]) -> None:
        """Raises OsdpError, now and ever after, unless the largest codes of all ranks are of one place."""
        steps, steps_lack, micro_batch, micro_batch_lacks = largest
        if not steps + steps_lack == micro_batch + micro_batch_lacks == _MOST:
            where = "behind the loop" if self.micro_batch == LEFT else f"in micro-batch {self.micro_batch + 1}"
            self._refusal = (
                f"this rank has made {self.steps} steps and is {where}, and another rank is elsewhere: one of them has"
                " left out a micro-batch or a step alone, so that gradients are not of one step; let the exception end"
                " the process, and resume from a checkpoint"
            )
        self.refuse()

    def refuse(self) -> None:
        """Raises what was found before, if anything."""
        if self._refusal is not None:
            raise OsdpError(self._refusal)
