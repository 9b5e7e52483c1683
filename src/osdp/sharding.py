"""The ways to hold a unit, as values: which ranks share it, and what is left of its gathered copy after forward.

A mode is these two facts; its collectives, its mesh and what lives when follow from them. The names are those of plan
files and of the command line.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Scope(Enum):
    """Ranks that share one copy of something."""

    RANK = "rank"  # each has its own
    NODE = "node"
    WORLD = "world"


class ShardingMode(StrEnum):
    """How a unit is held: the ranks over which it is sharded, and those over which it is sharded after forward."""

    REPLICATE = "replicate", Scope.RANK, Scope.RANK
    KEEP = "keep", Scope.WORLD, Scope.RANK
    FREE = "free", Scope.WORLD, Scope.WORLD
    FREE_TO_NODE = "free_to_node", Scope.WORLD, Scope.NODE
    KEEP_IN_NODE = "keep_in_node", Scope.NODE, Scope.RANK
    FREE_IN_NODE = "free_in_node", Scope.NODE, Scope.NODE

    sharded_over: Scope
    after_forward: Scope

    def __new__(cls, name: str, sharded_over: Scope, after_forward: Scope) -> ShardingMode:
        mode = str.__new__(cls, name)
        mode._value_ = name
        mode.sharded_over, mode.after_forward = sharded_over, after_forward
        return mode

    def __repr__(self) -> str:
        return repr(str(self))  # as users write it

    @property
    def is_sharded(self) -> bool:
        return self.sharded_over is not Scope.RANK

    @property
    def is_kept(self) -> bool:
        """Whether the gathered copy stays from forward to backward."""
        return self.is_sharded and self.after_forward is Scope.RANK

    @property
    def is_gathered_again(self) -> bool:
        """Whether backward gathers once more what forward has freed."""
        return self.is_sharded and self.after_forward is not Scope.RANK

    @property
    def is_sharded_anew(self) -> bool:
        """Whether forward leaves another shard behind than the one that is held always."""
        return self.is_gathered_again and self.after_forward is not self.sharded_over

    @property
    def is_reduced_across(self) -> bool:
        """Whether a reduction is scattered in the node, and then all-reduced across nodes."""
        return self.sharded_over is Scope.NODE

    def ranks(self, devices_per_node: int, world_size: int) -> int:
        """How many ranks share the unit."""
        return {Scope.RANK: 1, Scope.NODE: devices_per_node, Scope.WORLD: world_size}[self.sharded_over]


def stand_ins(mode: ShardingMode) -> tuple[ShardingMode, ...]:
    """A mode, and those nearest to it where fewer ranks hold a unit and the mode does not exist: the nearest first."""
    if not mode.is_sharded:
        return (mode,)
    return tuple(dict.fromkeys((mode, KEEP if mode.is_kept else FREE, REPLICATE)))


REPLICATE, KEEP, FREE, FREE_TO_NODE, KEEP_IN_NODE, FREE_IN_NODE = MODES = tuple(ShardingMode)
