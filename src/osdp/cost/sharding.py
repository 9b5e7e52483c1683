"""Along which dimension a parameter is sharded: one rule, for what is priced and for what runs.

[Note: Shard dimension]
FSDP2 pads the first dimension to a multiple of the ranks: 8 experts on 32 ranks would be held four times. It shards any
other dimension only where that divides evenly, and then copies once more: what is gathered is put in order through a
temporary of its size, and so is each gradient before it is reduced. So another dimension is taken only where padding
would waste much, and nothing small is worth it. What is sharded anew after forward FSDP2 can only cut along the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_WASTE = 1 / 8  # of a parameter; padding up to here costs less than copying
SMALL_NUMEL = 1 << 12


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which `ranks` ranks share a parameter; see [Note: Shard dimension]."""
    if math.prod(shape) < SMALL_NUMEL or -shape[0] % ranks <= MOST_WASTE * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)
