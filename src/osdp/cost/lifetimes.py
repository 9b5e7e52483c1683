"""The bytes that a unit holds, and from where to where: one list for each option, following FSDP2.

[Note: Reduction]
A unit's gradients are copied into the reduction's input when the unit is left in backward; the input lives until the
next unit's reduction begins. The result, in the master's dtype, is the rank's gradient. On asynchronous
gloo (see [Note: Reduce-scatter] in osdp.runtime.collectives), what a neighbour sends needs room for a part, and what
is exchanged on two levels room for a column. A reduction begins, then the one before it is waited for.

[Note: Copy-in]
On CPUs the kernel that copies gradients in (`_chunk_cat`) first makes padded copies of all that do not divide
over the ranks, and where the reduction has another dtype it copies one gradient at a time before it casts it. On CUDA
it is one kernel without copies.

[Note: Left at the end]
A unit none of whose inputs needs a gradient, such as an embedding, is left when backward has ended; so is a frozen one
that only frozen ones precede, and a unit that no gradient reached at all. FSDP2 reduces the latter too, with zeros that
it makes then, as other ranks may have gradients. The result lives until the ranks have agreed that there is none; see
[Note: Unused] in osdp.runtime.unused.
Where a unit that is left at the end belongs to a block, what it holds when backward leaves the block it is taken to
hold until then: an upper bound, as a block's bytes may depend on the block alone.

[Note: Gathered once]
Of several micro-batches the first one gathers a unit that stays gathered over all of them, and the last frees it. So
its copy is there from the start of a step, as most micro-batches find it, to the end of backward, as most leave it. The
first micro-batch has the gather's buffers beside it; what it does not have yet, the gradients of earlier micro-batches,
the buffers may take. All that is an upper bound: of two micro-batches the first holds all copies to its end and no
gradients at its start, and the last the other way round, and both are counted.

[Note: In place]
A replica computes with the parameters themselves where they have the dtype of the computation, else with a cast copy.

[Note: On the host]
Of a unit that is on the host (see [Note: Offload] in osdp.cost.offload) the device has, while a gather is issued, the
shard that it sends, copied in and cast; and a reduced gradient until it is copied out, which is at once. What FSDP2's
own all-reduce has summed stays to the end of backward, as elsewhere.
"""

from __future__ import annotations

from itertools import pairwise

from osdp.cluster import Cluster
from osdp.cost.positions import (
    BUFFERS,
    COPY,
    END,
    GATHERED,
    GATHERS,
    GRADIENTS,
    ISSUE,
    PARAMETERS,
    REDUCTIONS,
    START,
    STATES,
    Allocation,
    Places,
    Position,
)
from osdp.cost.slice_lifetimes import (
    all_reduced_slices,
    reduction_of_the_slice_before,
    shards_of_slices,
    slices_of_a_second_forward,
)
from osdp.cost.training import Training
from osdp.cost.units import Option, Sizes, Unit
from osdp.model.graph import ModelGraph
from osdp.sharding import ShardingMode


def unit_allocations(
    unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """All that a unit's option holds in a step; affine in `option.sharded` from 1 on."""
    cluster = unit.held_by(cluster)
    allocations: list[Allocation] = []
    for mode, count in option.held:
        sizes = unit.sizes(mode, cluster, option.slices)
        allocations += _held(mode, count, sizes, option, places, training, cluster)
    if places.enter is None or places.leave is None:
        return allocations  # never used: it is held, and that is all
    # Slices take turns: one is in use at a time, priced in the mode that needs most.
    mode = option.mode
    sizes = unit.sizes(mode, cluster, option.slices)
    allocations += _forward(option, sizes, places, training, cluster)
    allocations += _backward(option, sizes, places, training, cluster)
    if unit.trained and places.leave_backward is not None:
        allocations += _reduction(option, sizes, places, training, cluster)
    if places.late:
        assert places.leave_backward is not None
        lasting = (places.leave_backward <= hold.end < places.finish for hold in allocations)
        allocations = [
            h._replace(end=places.finish) if lasts else h for h, lasts in zip(allocations, lasting, strict=True)
        ]
    return allocations


def _held(
    mode: ShardingMode, count: int, sizes: Sizes, option: Option, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """Parameters, states and, once reduced, gradients of `count` slices; and their copies between the passes."""
    master, compute = training.precision.master_bytes, training.precision.compute_bytes
    states = sum(training.optimizer.state_bytes(shape, master) for shape in used_shards(sizes, places))
    allocations = [] if option.offload else [Allocation(PARAMETERS, count * sizes.held * master, START, END)]
    if places.leave_backward is not None and option.offload:
        allocations.append(_gradient_on_its_way(mode, sizes, places, training, cluster))
    elif places.leave_backward is not None:
        allocations.append(Allocation(STATES, count * states, START, END))
        deferred = option.defers(mode) and training.accumulation > 1
        allocations += _gradients(count, sizes, option, places, training, cluster, deferred=deferred)
        if option.slices > 1 and _holds_all_reduce(mode, cluster):
            allocations += all_reduced_slices(mode, count, sizes, option, places, training)
    if places.leave is None:
        return allocations
    again = places.enter_backward or places.freed
    if option.stays_gathered(training.accumulation):
        allocations.append(Allocation(GATHERED, sizes.gathered * compute, START, places.finish))
    elif mode.is_kept:
        # Kept slices gather up while the operator runs; between the passes they are the whole unit.
        begin, end = (places.leave, again) if option.slices == 1 else (places.enter, places.freed)
        allocations.append(Allocation(GATHERED, count * sizes.gathered * compute, begin or places.leave, end))
    elif mode.is_sharded_anew:
        shard = -(-sizes.gathered // cluster.devices_per_node) * compute
        if option.slices == 1:
            allocations.append(Allocation(GATHERED, shard, places.leave.next(), again.next()))
        else:
            allocations += shards_of_slices(count, shard, sizes, places, training)
    return allocations


def _gradient_on_its_way(
    mode: ShardingMode, sizes: Sizes, places: Places, training: Training, cluster: Cluster
) -> Allocation:
    """A reduced gradient, until it is copied out; see [Note: On the host]."""
    assert places.leave_backward is not None
    reduced = places.leave_backward.next()
    summed = _holds_all_reduce(mode, cluster) and training.reduce_bytes == training.precision.master_bytes
    nbytes = sizes.trained * training.precision.master_bytes
    return Allocation(BUFFERS, nbytes, reduced, places.finish if summed else reduced.next())


def used_shards(sizes: Sizes, places: Places) -> list[tuple[int, ...]]:
    """The shape of a rank's part of every parameter that gets a gradient: the optimizer steps these alone."""
    reached = {name for name, _ in places.gradients}
    return [shape for name, shape in sizes.shards if name in reached]


def _gradients(
    count: int,
    sizes: Sizes,
    option: Option,
    places: Places,
    training: Training,
    cluster: Cluster,
    *,
    deferred: bool,
) -> list[Allocation]:
    """Gradients once they are reduced; and those that wait for the last micro-batch to be reduced together."""
    gradient, leave = count * sizes.trained * training.precision.master_bytes, places.leave_backward
    assert leave is not None
    if deferred:
        return _partly_reduced(count * sizes.trained, option, places, leave, training, cluster)
    if places.is_unused:
        return [Allocation(GRADIENTS, gradient, leave.next(), places.finish)]
    if training.accumulation == 1:
        sliced = places.first_gradient if option.slices > 1 else None  # reduced one by one, inside the operator
        return [Allocation(GRADIENTS, gradient, sliced or leave.next(), END, REDUCTIONS)]
    if not option.reduce_once:  # from the second micro-batch on they are always there
        return [Allocation(GRADIENTS, gradient, START, END, REDUCTIONS)]
    # Earlier micro-batches hold the unreduced ones to their end, the last one its own part once it is reduced.
    unreduced = count * _unreduced_bytes(sizes, training)
    return [
        Allocation(GRADIENTS, unreduced, START, places.finish),
        Allocation(GRADIENTS, max(0, gradient - unreduced), leave.next(), places.finish),
        Allocation(GRADIENTS, gradient, places.finish, END),
    ]


def _partly_reduced(
    trained: int, option: Option, places: Places, leave: Position, training: Training, cluster: Cluster
) -> list[Allocation]:
    """Gradients that are reduced in the node at every micro-batch, and across nodes in the last one.

    What is reduced in the node lives, in the reduction's dtype, until the last micro-batch has added its own to it.
    """
    partial, gradient = trained * training.reduce_bytes, trained * training.precision.master_bytes
    if option.slices > 1:  # one slice's gives way to its gradient, then the next one's
        held = Allocation(GRADIENTS, max(partial, gradient), START, places.finish)
        return [held, Allocation(GRADIENTS, gradient, places.finish, END)]
    reduced = leave.next().next()
    added = reduced if not cluster.engine.reduces_before_waiting else leave.next()  # then `_reduction` has room for it
    if _lasts(training, cluster):
        added = reduction_end(places, training, cluster)
    beyond = 0 if _holds_all_reduce(option.mode, cluster) else max(0, partial - gradient)  # earlier micro-batches' own
    return [
        Allocation(GRADIENTS, partial, START, added),
        Allocation(GRADIENTS, gradient, leave.next(), places.finish if places.is_unused else END),
        Allocation(GRADIENTS, beyond, reduced, places.finish),
    ]


def _holds_all_reduce(mode: ShardingMode, cluster: Cluster) -> bool:
    """Whether FSDP2's own all-reduce holds its buffer through backward."""
    return (not mode.is_sharded or mode.is_reduced_across) and not cluster.engine.reduces_before_waiting


def _unreduced_bytes(sizes: Sizes, training: Training) -> int:
    """Gradients that wait for the last micro-batch."""
    return sum(numel for _, numel in sizes.gradients) * training.reduce_bytes


def _is_reduced_once(option: Option, sizes: Sizes, places: Places, training: Training) -> bool:
    """Whether a whole unit's gradients wait for the last micro-batch, and none of them is made of zeros then."""
    waits = training.accumulation > 1 and option.reduce_once and option.slices == 1
    return waits and len(places.gradients) == len(sizes.gradients)


def _computes_in_place(mode: ShardingMode, training: Training) -> bool:
    """See [Note: In place]."""
    return not mode.is_sharded and not training.precision.casts


def forward_issue(places: Places, cluster: Cluster) -> Position | None:
    """Where forward issues a gather: on asynchronous gloo, as the unit that issues it is entered.

    See [Note: Prefetch] in osdp.cost.gather_order.
    """
    issue = places.issue
    if issue is None or places.is_second or not cluster.engine.gathers_before_waiting:
        return issue
    return Position(issue.stage_pass, issue.slot - ISSUE + COPY)


def _forward(option: Option, sizes: Sizes, places: Places, training: Training, cluster: Cluster) -> list[Allocation]:
    mode, slices = option.mode, option.slices
    assert places.enter is not None and places.leave is not None
    if _computes_in_place(mode, training):
        return []
    compute = training.precision.compute_bytes
    copy = sizes.gathered * compute
    # the next one's gather is issued before its own is copied out
    issues_first = cluster.engine.gathers_before_waiting and places.issue is not None
    entered = places.enter.next() if issues_first else places.enter
    if option.stays_gathered(training.accumulation):
        return _first_gather(option, sizes, places, entered, training, cluster)
    allocations = [Allocation(GATHERED, copy, entered, places.leave)]
    if mode.is_sharded_anew and slices == 1:  # its own part is cloned before the copy is freed
        extra = sizes.clone_extra(cluster.devices_per_node) * compute
        allocations.append(Allocation(GATHERED, copy + extra, places.leave, places.leave.next()))
    column = _column_bytes(option, sizes, training, cluster)
    issue = forward_issue(places, cluster)
    sent = _sent_bytes(option, sizes.held, training)
    return allocations + _gather(mode, slices, sizes, sent, column, issue, entered, places.leave, training)


def _sent_bytes(option: Option, numel: int, training: Training) -> int:
    """What a gather's issue allocates beside its output: a cast, or a copy from the host, of what the rank sends."""
    return numel * training.precision.compute_bytes if training.precision.casts or option.offload else 0


def _first_gather(
    option: Option, sizes: Sizes, places: Places, entered: Position, training: Training, cluster: Cluster
) -> list[Allocation]:
    """What the first micro-batch has of a gather that is made once, and the others have not; see [Note: Gathered once].

    Until it is copied out, the gather's output is there in place of the copy.
    """
    assert places.leave is not None
    issue, column = forward_issue(places, cluster), _column_bytes(option, sizes, training, cluster)
    sent = _gather(option.mode, 1, sizes, sizes.held, column, issue, entered, places.leave, training)
    earlier = 0
    if places.leave_backward is not None:
        deferred = option.defers(option.mode)
        left = _gradients(1, sizes, option, places, training, cluster, deferred=deferred)
        earlier = sum(each.nbytes for each in left if each.start == START)
    found = []
    for begin, end in pairwise(sorted({entered, *(each.start for each in sent), *(each.end for each in sent)})):
        held = sum(each.nbytes for each in sent if each.start <= begin < each.end)
        instead = earlier + (sizes.gathered * training.precision.compute_bytes if begin < entered else 0)
        found.append(Allocation(BUFFERS, max(0, held - instead), begin, end))
    return found


def _column_bytes(option: Option, sizes: Sizes, training: Training, cluster: Cluster) -> int:
    """What a gather on two levels holds on its way; see [Note: Two levels] in osdp.runtime.collectives."""
    exchanged = sizes.gathered // cluster.devices_per_node if option.crosses(option.mode) else 0
    return exchanged * training.precision.compute_bytes


def _gather(
    mode: ShardingMode,
    slices: int,
    sizes: Sizes,
    sent_bytes: int,
    column_bytes: int,
    issue: Position | None,
    enter: Position,
    leave: Position,
    training: Training,
) -> list[Allocation]:
    """The buffers of one gather: its output, and the cast of what this rank sends.

    See [Note: Prefetch] in osdp.cost.gather_order.
    """
    compute = training.precision.compute_bytes
    if not mode.is_sharded:  # nothing is sent; a cast is made parameter by parameter
        return (
            [Allocation(BUFFERS, sizes.cast_extra * compute, enter, enter.next())] if training.precision.casts else []
        )
    output = sizes.gathered * compute
    allocations = [Allocation(BUFFERS, output, issue or enter, enter.next(), GATHERS)]
    if sent_bytes and issue is not None:
        allocations.append(Allocation(BUFFERS, sent_bytes, issue, issue.next()))
    if column_bytes and issue is not None:
        allocations.append(Allocation(BUFFERS, column_bytes, issue, enter))
    if slices > 1:  # while a slice computes, the next one is gathered
        allocations.append(Allocation(BUFFERS, output + column_bytes, enter.next(), leave, GATHERS))
    if sizes.moved:  # put in order through a temporary; see [Note: Shard dimension]
        allocations.append(Allocation(GATHERED, sizes.moved * compute, enter, enter.next() if slices == 1 else leave))
    return allocations


def _backward(option: Option, sizes: Sizes, places: Places, training: Training, cluster: Cluster) -> list[Allocation]:
    mode, slices = option.mode, option.slices
    compute = training.precision.compute_bytes
    if _computes_in_place(mode, training):
        return []
    if option.stays_gathered(training.accumulation):
        return []  # the copy is there; see [Note: Gathered once]
    copy, freed = sizes.gathered * compute, places.freed
    if places.enter_backward is None:
        return _gathered_in_vain(option, sizes, places, training, cluster)
    allocations = [Allocation(GATHERED, copy, places.enter_backward, freed)]
    if slices > 1 and places.repeated is not None:
        allocations += slices_of_a_second_forward(option, sizes, places, training)
    if len(places.gradients) < len(sizes.gradients):  # zeros are made for some while the copy is there, not the input
        beyond_input = max(0, copy - sizes.reduced * training.reduce_bytes)
        allocations.append(Allocation(GATHERED, beyond_input, freed, freed.next()))
    if not mode.is_kept:
        in_node = mode.is_sharded_anew
        sent = _sent_bytes(option, sizes.gathered // cluster.devices_per_node if in_node else sizes.held, training)
        column = 0 if in_node else _column_bytes(option, sizes, training, cluster)
        ahead = freed  # up to where the next slice's gather is held
        if slices == 2 and training.reduce_bytes >= compute:
            # of two, the one that computes beside the other's reduction has no slice after it
            ahead = places.first_gradient or ahead
        allocations += _gather(
            mode, slices, sizes, sent, column, places.issue_backward, places.enter_backward, ahead, training
        )
    return allocations


def _gathered_in_vain(
    option: Option, sizes: Sizes, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """The gather of a unit that backward never reaches, issued by the one before it: FSDP2 frees it in the end."""
    mode, issue, compute = option.mode, places.issue_backward, training.precision.compute_bytes
    if issue is None or not mode.is_gathered_again:
        return []
    shard = sizes.gathered // cluster.devices_per_node if mode.is_sharded_anew else sizes.held
    sent = _sent_bytes(option, shard, training)
    cast = [Allocation(BUFFERS, sent, issue, issue.next())] if sent else []
    return [Allocation(BUFFERS, sizes.gathered * compute, issue, places.finish), *cast]


def _lasts(training: Training, cluster: Cluster) -> bool:
    """Whether reductions run beside backward's kernels: asynchronous ones, if no cast waits for the result."""
    return cluster.engine.reduces_before_waiting and training.reduce_bytes == training.precision.master_bytes


def reduction_end(places: Places, training: Training, cluster: Cluster) -> Position:
    """Where a reduction's buffers are freed: where the next begins, or once the next is under way too."""
    if places.late:
        return places.finish
    return min(places.reduced.next().next(), places.finish) if _lasts(training, cluster) else places.reduced


def _reduction(option: Option, sizes: Sizes, places: Places, training: Training, cluster: Cluster) -> list[Allocation]:
    """The unit's own gradients until they are copied, then the reduction's buffers; see [Note: Reduction]."""
    assert places.leave_backward is not None
    mode, leave = option.mode, places.leave_backward
    master, reduce = training.precision.master_bytes, training.reduce_bytes
    deferred = training.accumulation > 1 and option.defers(mode) and option.slices == 1
    entry, copied = leave, leave.next()
    if option.slices > 1 and places.first_gradient:  # slices are reduced one by one, before the operator is left
        entry, copied = places.first_gradient, leave
    allocations = _own_gradients(option, sizes, places, entry, copied, training)
    under_way = _lasts(training, cluster)
    ended = freed = reduction_end(places, training, cluster)
    begin = leave.next() if option.slices == 1 else entry
    own_reduction = cluster.engine.reduces_before_waiting  # not FSDP2's
    if own_reduction and not mode.is_sharded and option.slices == 1:  # its input is freed once it is copied
        freed = begin
        beside = 0 if under_way else sizes.trained * master  # what the result is cast to, afterwards
        most = max(sizes.reduced, _room(option, sizes, cluster))  # the room is made before the last reduction ends
        allocations.append(Allocation(BUFFERS, max(0, most * reduce - beside), freed, freed.next()))
        begin = begin.next()  # only then room is made for what arrives
    once, sent = _is_reduced_once(option, sizes, places, training), sizes.reduced * reduce
    allocations.append(Allocation(BUFFERS, sent, entry, copied if once and mode.is_sharded else freed))
    if once and mode.is_sharded:
        # The last micro-batch has the input and the result where the earlier ones have the unreduced gradients.
        gradient, waiting = sizes.trained * master, _unreduced_bytes(sizes, training)
        allocations.append(Allocation(BUFFERS, max(0, sent + gradient - max(waiting, gradient)), copied, freed))
    if option.slices > 1 and under_way:
        beside = sent + _room(option, sizes, cluster) * reduce
        allocations.append(reduction_of_the_slice_before(beside, sizes, entry, copied, training))
    if cluster.device.is_cpu:
        allocations.append(Allocation(BUFFERS, _copied_in_bytes(sizes, option, training), entry, copied))
    result = sizes.trained * reduce
    if own_reduction:
        room = _room(option, sizes, cluster)
        if under_way:
            allocations.append(Allocation(BUFFERS, room * reduce, begin, ended))
        elif mode.is_sharded:  # it is free again when the result is cast; a replica's is less than its input was
            room += sizes.trained if deferred else 0  # and so is what earlier micro-batches gave
            allocations.append(Allocation(BUFFERS, max(0, room * reduce - sizes.trained * master), begin, begin.next()))
    lasting = _holds_all_reduce(mode, cluster) and option.slices == 1
    if reduce != master:
        allocations.append(Allocation(BUFFERS, result, leave.next(), places.finish if lasting else leave.next().next()))
    if training.accumulation > 1 and not deferred and not once and not option.offload:
        allocations.append(
            _added(option, sizes, places, ended if under_way else leave.next().next(), training, cluster)
        )
    return allocations


def _added(
    option: Option, sizes: Sizes, places: Places, ended: Position, training: Training, cluster: Cluster
) -> Allocation:
    """A result that is added to that of earlier micro-batches; reduced once there is none, and room to spare."""
    assert places.leave_backward is not None
    master, mode = training.precision.master_bytes, option.mode
    makes_zeros = len(places.gradients) < len(sizes.gradients)  # they are views of the result, dropped in the end
    is_first = option.reduce_once or option.defers(mode)
    holds = _holds_all_reduce(mode, cluster) and option.slices == 1
    lasting = holds and training.reduce_bytes == master and not is_first
    end = places.finish if makes_zeros or lasting else ended
    return Allocation(BUFFERS, sizes.trained * master, places.leave_backward.next(), end)


def _room(option: Option, sizes: Sizes, cluster: Cluster) -> int:
    """Elements that an asynchronous reduction has room for beside its input and its result."""
    if not option.mode.is_sharded:
        if option.reduced_with is not None or cluster.world_size == 1:
            return 0
        sent = sizes.trained + option.carries
        return -(-sent // cluster.world_size) + (sent if option.carries else 0)
    return sizes.trained + (sizes.reduced // cluster.devices_per_node if option.crosses(option.mode) else 0)


def _own_gradients(
    option: Option, sizes: Sizes, places: Places, entry: Position, copied: Position, training: Training
) -> list[Allocation]:
    """A unit's gradients, each from its kernel on until all are copied in, from `entry` to `copied`."""
    compute, numels = training.precision.compute_bytes, dict(sizes.gradients)
    held_longer: list[str] = []
    if option.mode.is_sharded and copied != places.leave_backward:  # of slices none outlives the operator
        # FSDP2's loop variables still name the last one, and the last of those that it has put in order
        held_longer = [one[-1][0] for one in (sizes.gradients, sizes.moved_gradients) if one]
    made = dict(places.gradients)
    allocations = [
        Allocation(GRADIENTS, numel * compute, made.get(name, entry), copied.next() if name in held_longer else copied)
        for name, numel in numels.items()
    ]
    if sizes.moved_gradients:  # the last one beside its copy; those before it have given way to theirs
        allocations.append(Allocation(GRADIENTS, sizes.moved_gradients[-1][1] * compute, entry, copied))
    return allocations


def _copied_in_bytes(sizes: Sizes, option: Option, training: Training) -> int:
    """What a processor's copy into the reduction needs beside its input; see [Note: Copy-in]."""
    compute, reduce = training.precision.compute_bytes, training.reduce_bytes
    if training.accumulation > 1 and option.reduce_once:  # earlier micro-batches' gradients have the reduction's dtype
        compute = reduce
    return (sizes.padded + (sizes.largest if compute != reduce else 0)) * compute


def stepping_bytes(unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster) -> int:
    """Bytes that the optimizer needs for a unit only while it steps."""
    master, cluster = training.precision.master_bytes, unit.held_by(cluster)
    if option.offload:
        return 0
    return sum(
        count * training.optimizer.temporary_bytes(shape, master)
        for mode, count in option.held
        for shape in used_shards(unit.sizes(mode, cluster, option.slices), places)
    )


def chunk_bytes(graph: ModelGraph, training: Training) -> int:
    """Bytes that the optimizer needs for the chunk that it steps: a bound where no rank holds so large a part."""
    largest = max((p.numel for p in graph.parameters.values() if p.trainable), default=0)
    return training.optimizer.chunk_bytes(largest)
