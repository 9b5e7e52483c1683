"""What of a block's activations is computed a second time in backward, as a value."""

from __future__ import annotations

from enum import StrEnum

from osdp.errors import UsageError


class Recompute(StrEnum):
    """How much of a block is recomputed; false where nothing is.

    `SELECTIVE` saves what products and fused attention put out and computes everything else again; `FULL` saves the
    block's inputs alone. See [Note: Selective] in osdp.model.selective. `ON_HOST` is full too, and the block's input is
    on the host between its two forwards; see [Note: Input on the host] in osdp.model.input_on_host.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    ON_HOST = "host"

    def __bool__(self) -> bool:
        return self is not Recompute.NONE

    @property
    def words(self) -> str:
        """As part of a sentence about a block."""
        return {
            "none": "activations saved",
            "selective": "recomputed but products",
            "full": "recomputed",
            "host": "recomputed, its input on the host",
        }[self.value]


EVERY_RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)  # on the device
AUTO = "auto"  # whichever is best for each block
WORDS = (*(each.value for each in EVERY_RECOMPUTE), AUTO)


def read_recompute(asked: bool | str) -> tuple[Recompute, ...]:
    """What blocks may choose from: one of `WORDS`, or True for any and False for none."""
    word = asked if isinstance(asked, str) else AUTO if asked else Recompute.NONE.value
    if word not in WORDS:
        raise UsageError(f"recompute is {word!r}, but must be one of {', '.join(WORDS)}")
    return EVERY_RECOMPUTE if word == AUTO else (Recompute(word),)
