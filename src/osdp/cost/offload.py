"""Units, and inputs of blocks, on the host: what that takes there, and how long.

[Note: Offload]
Such a unit is held as FSDP2's `CPUOffloadPolicy` holds it. A gather first copies the rank's shard to the device, on the
stream of the computation, where FSDP2 copies in what an asynchronous gather sends; nothing hides that. A reduction ends
with a copy of the result to the host, on the stream of the reduction, beside the computation. Where micro-batches are
accumulated, the host adds that to what it has, so that its thread, and with it the computation, waits for the whole
reduction. The optimizer steps these shards on the host, at the rank's share of the host's memory rate.

[Note: Pinned]
FSDP2 pins the host's shards, and torch's allocator of pinned memory gives powers of two: each parameter's shard takes
the next one, and so does a gradient that is copied beside the computation. States and sums are not pinned.

[Note: Inputs]
The input of a block that is recomputed in full may be on the host between its two forwards; see [Note: Input on the
host] in osdp.model.input_on_host. That is two copies in every micro-batch on the stream of the computation, one as the
block begins, one as its second forward does. At the end of forward the host has the inputs of all such blocks, pinned,
of one micro-batch. Their sum is added to that of units, whose own most is at another time: the optimizer's.
"""

from __future__ import annotations

import math

from osdp.cluster import Cluster
from osdp.cost.lifetimes import used_shards
from osdp.cost.positions import Places
from osdp.cost.training import Training
from osdp.cost.units import Option, Sizes, Unit
from osdp.model.graph import Trace
from osdp.sharding import ShardingMode

_ADDED = 3  # reads and writes of a gradient that is added to another one


def can_offload(mode: ShardingMode, option: Option, training: Training, cluster: Cluster) -> bool:
    """Whether a unit may be held on the host in this way.

    Not where the device has another shard of it between the passes, where gradients wait on the device, where loss
    scaling looks at them, and where the optimizer's states are not as large as what they are of.
    """
    late = option.reduce_once or option.all_reduce_once or option.gather_once
    plain = option.slices == 1 and not (late or option.two_levels)
    held = mode.is_sharded and not mode.is_sharded_anew
    return held and plain and cluster.can_offload and may_step_on_host(training)


def may_step_on_host(training: Training) -> bool:
    return training.precision.name != "fp16" and not training.optimizer.is_whole


def host_bytes(unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster) -> int:
    """The most that a rank's part of a unit takes on the host: while the optimizer steps it, or adds to its gradients.

    The most of all units is the sum: the optimizer steps them together. A gradient that is added is one at a time, so
    that for an optimizer without temporaries, and several micro-batches, the sum is too much, by a shard a unit.
    """
    if not option.offload:
        return 0
    sizes, master = unit.sizes(option.mode, cluster), training.precision.master_bytes
    ranks = option.mode.ranks(cluster.devices_per_node, cluster.world_size)
    total = sum(pinned_bytes(numel // ranks * master) for numel in sizes.tensors)
    if places.leave_backward is None or not unit.trained:
        return total
    shapes = used_shards(sizes, places)
    states = sum(training.optimizer.state_bytes(shape, master) for shape in shapes)
    stepping = sum(training.optimizer.temporary_bytes(shape, master) for shape in shapes)
    shards = [math.prod(shape) * master for _, shape in sizes.shards]
    if training.accumulation > 1:  # one more of them, before it is added
        return total + states + sum(shards) + max(stepping, max(shards, default=0))
    return total + states + sum(map(pinned_bytes, shards)) + stepping


def input_host_bytes(trace: Trace, batch: int) -> int:
    """What a block's input takes on the host; see [Note: Inputs]."""
    return pinned_bytes(trace.on_host.at(batch))


def input_seconds(trace: Trace, batch: int, cluster: Cluster) -> float:
    """Of the copy of a block's input, in one direction."""
    return cluster.host_copy_seconds(trace.on_host.at(batch)) if trace.is_on_host else 0.0


def pinned_bytes(nbytes: int) -> int:
    """What so many bytes take; see [Note: Pinned]."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def to_device_seconds(sizes: Sizes, training: Training, cluster: Cluster) -> float:
    """Of a gather's copy to the device."""
    return cluster.host_copy_seconds(sizes.held * training.precision.master_bytes)


def to_host_seconds(sizes: Sizes, training: Training, cluster: Cluster) -> float:
    """Of a reduction's copy to the host."""
    return cluster.host_copy_seconds(sizes.trained * training.precision.master_bytes)


def adding_seconds(sizes: Sizes, training: Training, cluster: Cluster) -> float:
    """What the host takes to add a result to that of earlier micro-batches."""
    return cluster.host_seconds(_ADDED * sizes.trained * training.precision.master_bytes)
