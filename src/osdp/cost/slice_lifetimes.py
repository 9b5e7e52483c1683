"""What the slices of a split operator hold beside what one of them, or the whole operator, would.

[Note: Slices' activations]
A split operator holds a slice's output beside the joined one, and in backward a slice's gradient of the input beside
the sum of those before it. Both grow with the batch, which units' own bytes do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from osdp.cost.positions import BUFFERS, GATHERED, Allocation, Places, Position
from osdp.cost.training import Training
from osdp.cost.units import Option, Sizes, Unit
from osdp.model.graph import Affine, Operator
from osdp.sharding import ShardingMode


class Growth(NamedTuple):
    """A hold that grows with the batch size."""

    nbytes: Affine
    start: Position
    end: Position


def slice_growths(unit: Unit, option: Option, places: Places, operators: Mapping[str, Operator]) -> list[Growth]:
    """What a split operator's activations need beside those of the whole one; see [Note: Slices' activations]."""
    if (
        option.slices == 1
        or places.enter is None
        or places.leave is None
        or places.enter.stage_pass != places.leave.stage_pass
    ):
        return []
    operator = operators[unit.name]
    shape = next(p.shape for p in unit.parameters if len(p.shape) > 1)
    outputs, inputs = shape[unit.split_dim], shape[1 - unit.split_dim]
    sliced = -(-outputs // option.slices)
    growths = [Growth(_per_call(operator, sliced, outputs), places.enter.next().next(), places.leave)]
    if places.repeated is not None:
        begin = places.repeated.next().next()
        growths.append(Growth(_per_call(operator, sliced, outputs), begin, begin.next()))
    first, leave = places.first_gradient, places.leave_backward
    takes_tokens = operator.kind == "Embedding"  # they have no gradient
    if first is not None and leave is not None and leave.stage_pass == first.stage_pass and not takes_tokens:
        growths.append(Growth(_per_call(operator, inputs, outputs), first, leave))
    return growths


def _per_call(operator: Operator, part: int, outputs: int) -> Affine:
    """The bytes of one call's output if it had `part` features in place of `outputs`."""
    whole = operator.output_bytes
    return Affine(*(each * part // (outputs * operator.calls) for each in (whole.constant, whole.per_sample)))


def shards_of_slices(count: int, shard: int, sizes: Sizes, places: Places, training: Training) -> list[Allocation]:
    """What slices keep in the node: it gathers up while the operator runs, and goes slice by slice in backward."""
    assert places.enter is not None
    if places.second is not None:  # it has gone when a second forward has gathered all of them
        return [Allocation(GATHERED, count * shard, places.enter, places.second.next())]
    if places.first_gradient is None:
        return _given_way(count, shard, places.enter, sizes, places, training)
    own = Allocation(GATHERED, shard, places.enter, places.first_gradient)  # of the slice that backward begins with
    return [own, *_given_way(count - 1, shard, places.enter, sizes, places, training)]


def slices_of_a_second_forward(option: Option, sizes: Sizes, places: Places, training: Training) -> list[Allocation]:
    """FSDP2 does not free what a forward within backward has gathered: all slices are there until backward has passed.

    So it is with the last operator of a block too, which backward reaches before the block runs once more. That one is
    there at a time is counted elsewhere, and so are all kept ones.
    """
    begin, gathered = places.repeated, sizes.gathered * training.precision.compute_bytes
    assert begin is not None
    count = option.slices if training.precision.casts else option.sharded * option.mode.is_sharded
    count -= option.sharded if option.mode.is_kept else 1
    return _given_way(count, gathered, begin, sizes, places, training)


def _given_way(
    count: int, nbytes: int, begin: Position, sizes: Sizes, places: Places, training: Training
) -> list[Allocation]:
    """What `count` slices hold until backward, where each leaves its gradient in place of it.

    So that most is held by the first slice or the last.
    """
    first = places.first_gradient
    if first is None:
        return [Allocation(GATHERED, count * nbytes, begin, places.freed)]
    gradient = sizes.trained * training.precision.master_bytes if training.accumulation == 1 else 0
    return [
        Allocation(GATHERED, count * nbytes, begin, first),
        Allocation(GATHERED, count * max(0, nbytes - gradient), first, places.freed),
    ]


def all_reduced_slices(
    mode: ShardingMode, count: int, sizes: Sizes, option: Option, places: Places, training: Training
) -> list[Allocation]:
    """Buffers of slices' all-reduces, which FSDP2 holds through backward, where gradients are not what is in them."""
    adds = training.accumulation > 1 and not option.reduce_once and not option.defers(mode)
    casts = training.reduce_bytes != training.precision.master_bytes
    if not (adds or casts):
        return []
    begin = places.first_gradient or places.leave_backward
    assert begin is not None
    return [Allocation(BUFFERS, count * sizes.trained * training.reduce_bytes, begin, places.finish)]


def reduction_of_the_slice_before(
    buffers: int, sizes: Sizes, entry: Position, copied: Position, training: Training
) -> Allocation:
    """What the reduction of one slice still holds when that of the next begins, and ends only then.

    Of several micro-batches the results of both wait to be added to those of earlier ones.
    """
    results = 2 * sizes.trained * training.precision.master_bytes if training.accumulation > 1 else 0
    return Allocation(BUFFERS, buffers + results, entry, copied)
