"""What of a block's activations is computed a second time in backward, as a value."""

from __future__ import annotations

from enum import StrEnum

from osdp.errors import UsageError


class Recompute(StrEnum):
    """How much of a block is recomputed; false where nothing is.

    `SELECTIVE` saves what products and fused attention put out and computes everything else again; `FULL` saves the
    block's inputs alone. See [Note: Selective] in osdp.model.selective.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"

    def __bool__(self) -> bool:
        return self is not Recompute.NONE

    @property
    def words(self) -> str:
        """As part of a sentence about a block."""
        return {"none": "activations saved", "selective": "recomputed but products", "full": "recomputed"}[self.value]


EVERY_RECOMPUTE = tuple(Recompute)
AUTO = "auto"  # whichever is best for each block
WORDS = (*(each.value for each in Recompute), AUTO)


def read_recompute(asked: bool | str) -> tuple[Recompute, ...]:
    """What blocks may choose from: one of `WORDS`, or True for any and False for none."""
    word = asked if isinstance(asked, str) else AUTO if asked else Recompute.NONE.value
    if word not in WORDS:
        raise UsageError(f"recompute is {word!r}, but must be one of {', '.join(WORDS)}")
    return EVERY_RECOMPUTE if word == AUTO else (Recompute(word),)
