"""The decision as tables: what every option costs, at one batch size. All bytes are whole numbers.

[Note: Problem]
A step goes through the stages forward and then backward. Each stage takes one variant; in it each of its units takes
one option. An option of a split unit also takes a number: how many of its slices are sharded; its costs are affine in
that number. At every row of every pass

    constant + always(all) + held between passes(stages before) + gradients and rest(stages after, in backward)
    + activations + own units + what the neighbours' gathers and reductions hold here        <= limit

and at the optimizer likewise. Where units, or inputs of blocks, may be held on the host, the sum of what all take there
is within a limit of its own. The objective is the step's seconds: those of its two streams (see [Note: Streams] in
osdp.search.streams) where they overlap, the sum of all operations where they do not, and a mixture where they overlap
in part.

[Note: Micro-batches]
Of several micro-batches the first one carries the gathers of what stays gathered over all of them, the last one what is
reduced once a step: all of a reduction, its all-reduce across nodes, or nothing. So there are three kinds of them,
FIRST, OFTEN and LAST; one that is alone is both first and last. The streams meet at the end of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from osdp.search.streams import StagePass

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Amount:
    """base + slope · sharded slices; slope is 0 where nothing is split."""

    base: int = 0
    slope: int = 0

    def at(self, sharded: int) -> int:
        return self.base + self.slope * sharded


@dataclass(frozen=True)
class Seconds:
    """base + slope · sharded slices, in seconds."""

    base: float = 0.0
    slope: float = 0.0

    def at(self, sharded: int) -> float:
        return self.base + self.slope * sharded


TOLERANCE = 1e-9  # relative: what two sums of the same seconds in another order may differ by
NO_BYTES = Amount()
NO_SECONDS = Seconds()
GATHERED_FIRST = ("gather_first", "copy_first")  # what the first micro-batch takes beyond "gather" and "copy"
REDUCED = ("reduce", "copy_reduce", "slice_reduce", "slice_wires_reduce")  # in every micro-batch
REDUCED_LAST = tuple(f"{name}_last" for name in REDUCED)  # what the last one takes beyond that
BYTES = (  # the amounts of an option that add up over units
    *("always", "between", "after", "stepping", "ahead", "cast", "ahead_backward", "cast_backward"),
    *("reducing", "host"),
)
SECONDS = (
    *("gather", "gather_again", "reduce", "copy", "copy_again", "copy_reduce", "slice_run", "slice_rest"),
    *("slice_run_again", "slice_rest_again", "slice_reduce", "slice_wires", "slice_wires_reduce", "step"),
    *GATHERED_FIRST,
    *REDUCED_LAST,
)
TAKEN_TOGETHER = tuple(  # each kind of seconds that every micro-batch takes, with what the first or the last adds to it
    (name, *(more for more in (f"{name}_first", f"{name}_last") if more in SECONDS))
    for name in SECONDS
    if name not in (*GATHERED_FIRST, *REDUCED_LAST)
)


class MicroBatch(NamedTuple):
    """A kind of micro-batch; see [Note: Micro-batches]."""

    is_first: bool
    is_last: bool

    def takes(self, names: Sequence[str]) -> list[str]:
        """Of some kinds of seconds, those that this kind of micro-batch takes."""
        left_out = (*(() if self.is_first else GATHERED_FIRST), *(() if self.is_last else REDUCED_LAST))
        return [name for name in names if name not in left_out]


FIRST, OFTEN, LAST = MicroBatch(True, False), MicroBatch(False, False), MicroBatch(False, True)
ALONE = MicroBatch(True, True)


@dataclass(frozen=True)
class UnitOption:
    """One option of one unit. `key` names it to whoever made the table; `slices` bounds the number of sharded ones.

    Bytes: `always`, `between` the unit's passes, `after` its backward, in the optimizer (`stepping`); `ahead` and
    `ahead_backward` are its gather's buffer in the pass before it, `cast` and `cast_backward` what is added as it is
    issued; `reducing` its reduction's buffer in the pass after; `host` is not on the device. Rows of its own passes:
    `forward`, `backward` ([row, base or slope]). `far` replaces between and after for a unit that spans stages: bytes
    in every pass.
    Seconds on the communication stream: `gather`, `gather_again` and `reduce`, of split units one slice's; and of
    copies on the compute stream. Slices take turns: `slice_run` is what forward takes before the last one of them,
    waits included, `slice_rest` what its kernels then take less; `slice_reduce` is added to backward where slices are
    reduced. `slice_wires` and `slice_wires_reduce` are the other slices' collectives, which hide in these. What ends in
    `_last` comes on top in the last micro-batch, what ends in `_first` in the first.
    """

    key: object
    forward: IntArray
    backward: IntArray
    slices: int = 1
    always: Amount = NO_BYTES
    between: Amount = NO_BYTES
    after: Amount = NO_BYTES
    stepping: Amount = NO_BYTES
    ahead: Amount = NO_BYTES
    cast: Amount = NO_BYTES
    ahead_backward: Amount = NO_BYTES
    cast_backward: Amount = NO_BYTES
    reducing: Amount = NO_BYTES
    host: Amount = NO_BYTES
    far: IntArray | None = None
    gather: Seconds = NO_SECONDS
    gather_again: Seconds = NO_SECONDS
    reduce: Seconds = NO_SECONDS
    copy: Seconds = NO_SECONDS
    copy_again: Seconds = NO_SECONDS
    copy_reduce: Seconds = NO_SECONDS
    gather_first: Seconds = NO_SECONDS
    copy_first: Seconds = NO_SECONDS
    slice_run: Seconds = NO_SECONDS
    slice_rest: Seconds = NO_SECONDS
    slice_run_again: Seconds = NO_SECONDS
    slice_rest_again: Seconds = NO_SECONDS
    slice_reduce: Seconds = NO_SECONDS
    slice_wires: Seconds = NO_SECONDS
    slice_wires_reduce: Seconds = NO_SECONDS
    reduce_last: Seconds = NO_SECONDS
    copy_reduce_last: Seconds = NO_SECONDS
    slice_reduce_last: Seconds = NO_SECONDS
    slice_wires_reduce_last: Seconds = NO_SECONDS
    step: Seconds = NO_SECONDS
    is_plain: bool = False  # replicas, or shards over all ranks of which forward leaves nothing more; nothing else
    parts: tuple[tuple[UnitOption, int], ...] = ()  # of units that choose together: each one's option and its slices

    def changed(self, **fields: Any) -> UnitOption:
        """As `replace` does it, in a fraction of the time: tables have tens of thousands of options."""
        made = object.__new__(UnitOption)
        made.__dict__.update(self.__dict__, **fields)
        return made

    def of(self, part: int, sharded: int) -> tuple[UnitOption, int]:
        """The option of one unit of those that choose together, or of the only one."""
        return self.parts[part] if self.parts else (self, sharded)

    @property
    def differs_first(self) -> bool:
        """Whether the first micro-batch takes something that the others do not."""
        return any(getattr(self, name) != NO_SECONDS for name in GATHERED_FIRST)

    @property
    def differs_last(self) -> bool:
        """Whether the last micro-batch takes something that the others do not."""
        return any(getattr(self, name) != NO_SECONDS for name in REDUCED_LAST)

    @property
    def counts(self) -> range:
        """The numbers of sharded slices to choose from."""
        return range(1, self.slices + 1)


@dataclass(frozen=True)
class CrossStageUnit:
    """A unit of another stage that is used in this one: its rows here, option by option."""

    stage: int
    unit: int
    forward: tuple[IntArray, ...]
    backward: tuple[IntArray, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of one pass. `activations` is relative to the pass's start, which is a row too: one is not negative.

    `tail` marks rows at which the next stage's gather is under way, `issue` those at which it is issued, `head` those
    at which the last stage's reduction is.
    """

    activations: IntArray
    tail: NDArray[np.bool_]
    issue: NDArray[np.bool_]
    head: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.activations)


@dataclass(frozen=True)
class VariantTable:
    """A stage in one variant. `saved` is what its forward leaves behind, `freed` the change over its backward.

    `host` is what it has on the host beside its units.
    """

    key: object
    units: tuple[tuple[UnitOption, ...], ...]
    forward: Rows
    backward: Rows
    saved: int
    freed: int
    forward_pass: StagePass
    backward_pass: StagePass
    cross_stage_units: tuple[CrossStageUnit, ...] = ()
    is_block: bool = True
    is_whole: bool = True  # a block that is gathered in one piece, or no block
    host: int = 0

    @property
    def passes(self) -> tuple[StagePass, StagePass]:
        return self.forward_pass, self.backward_pass


@dataclass(frozen=True)
class StageTable:
    """A stage; equal `alike` numbers mean interchangeable stages."""

    variants: tuple[VariantTable, ...]
    alike: int


@dataclass(frozen=True)
class Problem:
    stages: tuple[StageTable, ...]
    constant: int
    limit: int
    overlap: float
    accumulation: int = 1
    stepping: int = 0  # bytes in the optimizer, beside those of units
    host_limit: int | None = None  # of what one rank has on the host
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # stages that were judged before

    @cached_property
    def micro_batches(self) -> list[tuple[MicroBatch, int]]:
        """The kinds of micro-batches, and how many of each there are; see [Note: Micro-batches]."""
        if self.accumulation == 1:
            return [(ALONE, 1)]
        options = [option for variant in self._variants() for unit in variant.units for option in unit]
        first = [(FIRST, 1)] if any(option.differs_first for option in options) else []
        last = [(LAST, 1)] if any(option.differs_last for option in options) else []
        often = self.accumulation - len(first) - len(last)
        return [*first, *([(OFTEN, often)] if often else []), *last]

    def _variants(self) -> Sequence[VariantTable]:
        kinds = {id(stage.variants): stage.variants for stage in self.stages}
        return [variant for variants in kinds.values() for variant in variants]


@dataclass(frozen=True)
class StageChoice:
    """The variant of a stage and, for each of its units, the option and the number of sharded slices."""

    variant: int
    options: tuple[tuple[int, int], ...]
