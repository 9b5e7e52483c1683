"""Where in a step something is: passes, slots, where a unit is gathered, entered and left; what bytes are called.

[Note: Slot]
The plan acts at marks (see [Note: Trace]). Each mark opens a segment, and a segment has three slots: first what is
gathered is copied out, or gradients are copied in for their reduction; then the next gather is issued, or the
reduction's result exists; then the segment itself computes. On asynchronous gloo, forward issues first and
copies out then. A position is (pass, slot): a step goes through the stages
forward, then backward, then the optimizer. A hold is alive from `start` up to, not including, `end`.

[Note: Pools]
The caching allocator gives a freed block only to the stream that it was allocated on. FSDP2 allocates what a gather
puts out on the stream that copies into it, the result of a reduction on the reductions' stream, and all else on the
stream that computes. So what a process has reserved is the sum of three peaks, which need not be at the same time. A
device without memory to reserve more makes the allocator give back what a pool does not use: a plan fits by what is
allocated at once, and runs without that only if the three peaks fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATES = "optimizer states"
GATHERED = "gathered copies"
BUFFERS = "communication buffers"
SAVED = "saved activations"
TEMPORARIES = "temporaries"
CONSTANTS = "buffers and inputs"
PARTS = (PARAMETERS, GRADIENTS, STATES, GATHERED, BUFFERS, SAVED, TEMPORARIES, CONSTANTS)
COMPUTE, GATHERS, REDUCTIONS = "compute", "gathers", "reductions"
POOLS = (GATHERS, REDUCTIONS)  # beside that of the compute stream
COPY, ISSUE, RUN = 0, 1, 2  # the three slots of a segment; see [Note: Slot]


class Position(NamedTuple):
    stage_pass: int
    slot: int

    def next(self) -> Position:
        return Position(self.stage_pass, self.slot + 1)


START = Position(-1, 0)
END = Position(1 << 40, 0)


class Allocation(NamedTuple):
    """Bytes alive from `start` up to `end`; `pool` says on which stream they are allocated, see [Note: Pools]."""

    part: str
    nbytes: int
    start: Position
    end: Position
    pool: str = COMPUTE


@dataclass(frozen=True)
class Places:
    """Where a unit is used: positions of COPY slots, except the two issues. See [Note: Slot].

    `issue` is where its gather is issued, None for the step's first. `reduced` is where the next reduction begins.
    `turn` and `turn_again` say in which turn, where several gathers are issued at one place.
    """

    issue: Position | None
    enter: Position | None
    leave: Position | None
    issue_backward: Position | None
    enter_backward: Position | None
    leave_backward: Position | None
    reduced: Position
    finish: Position  # backward is done, the optimizer has not begun
    gradients: tuple[tuple[str, Position], ...]
    calls: int = 1  # in forward
    second: Position | None = None  # where a second forward enters it, and it was not there before
    repeated: Position | None = None  # where a second forward enters it
    is_second: bool = False  # the step's first unit issues its gather
    late: bool = False  # of a block, but left when backward has ended; see [Note: Left at the end]
    turn: int = 0
    turn_again: int = 0

    @property
    def freed(self) -> Position:
        """Where backward frees its copy: frozen below the first gradient, when backward has ended."""
        return self.leave_backward or self.finish

    @property
    def first_gradient(self) -> Position | None:
        return min((position for _, position in self.gradients), default=None)

    @property
    def is_unused(self) -> bool:
        """Whether backward leaves it without a gradient for any of its parameters."""
        return self.leave_backward is not None and not self.gradients

    @property
    def gathers(self) -> list[tuple[Position, Position]]:
        """Gathers that are issued ahead: where, and where their unit is entered."""
        pairs = (self.issue, self.enter), (self.issue_backward, self.enter_backward)
        return [(issue, enter) for issue, enter in pairs if issue is not None and enter is not None]
