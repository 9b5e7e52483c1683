"""The bytes that a unit holds, and from where to where: one list for each option, following FSDP2.

[Note: Slot]
The plan acts at marks (see [Note: Trace]). Each mark opens a segment, and a segment has three slots: first what is
gathered is copied out, or gradients are copied in for their reduction; then the next gather is issued, or the
reduction's result exists; then the segment itself computes. On asynchronous gloo, forward issues first and
copies out then. A position is (visit, slot): a step visits the stages
forward, then backward, then the optimizer. A hold is alive from `start` up to, not including, `end`.

[Note: Prefetch]
Every unit issues the next one's gather when its own is done, in both directions, so that one gather is under way
while one unit computes. The gather's buffer lives from there until the next unit has copied it out. On asynchronous
gloo, forward issues it before it waits for its own, so that the link is not idle while that is copied
out. The step's first unit and slices wait first.

[Note: Reduction]
A unit's gradients are copied into the reduction's input when the unit is left in backward; the input lives until the
next unit's reduction begins. The result, in the master's dtype, is the rank's gradient. On asynchronous
gloo (see [Note: Reduce-scatter] in osdp.runtime.collectives), what a neighbour sends needs room for a part, and what
is exchanged on two levels room for a column. A reduction begins, then the one before it is waited for.

[Note: Copy-in]
On CPUs the kernel that copies gradients in (`_chunk_cat`) first makes padded copies of all that do not divide
over the ranks, and where the reduction has another dtype it copies one gradient at a time before it casts it. On CUDA
it is one kernel without copies.

[Note: Slices' activations]
A split operator holds a slice's output beside the joined one, and in backward a slice's gradient of the input beside
the sum of those before it. Both grow with the batch, which units' own bytes do not.

[Note: Left at the end]
A unit none of whose inputs needs a gradient, such as an embedding, is left when backward has ended; so is a frozen one
that only frozen ones precede, and a unit that no gradient reached at all. FSDP2 reduces the latter too, with zeros that
it makes then, as other ranks may have gradients. The result lives until the ranks have agreed that there is none; see
[Note: Unused] in osdp.runtime.unused.
Where a unit that is left at the end belongs to a block, what it holds when backward leaves the block it is taken to
hold until then: an upper bound, as a block's bytes may depend on the block alone.

[Note: In place]
A replica computes with the parameters themselves where they have the dtype of the computation, else with a cast copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from osdp.cluster import Cluster
from osdp.cost.training import Training
from osdp.cost.units import Option, Sizes, Unit
from osdp.model.graph import Affine, Operator
from osdp.sharding import ShardingMode

PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATES = "optimizer states"
GATHERED = "gathered copies"
BUFFERS = "communication buffers"
SAVED = "saved activations"
TEMPORARIES = "temporaries"
CONSTANTS = "buffers and inputs"
PARTS = (PARAMETERS, GRADIENTS, STATES, GATHERED, BUFFERS, SAVED, TEMPORARIES, CONSTANTS)

COPY, ISSUE, RUN = 0, 1, 2  # the three slots of a segment; see [Note: Slot]


class Position(NamedTuple):
    visit: int
    slot: int

    def next(self) -> Position:
        return Position(self.visit, self.slot + 1)


START = Position(-1, 0)
END = Position(1 << 40, 0)


class Allocation(NamedTuple):
    part: str
    nbytes: int
    start: Position
    end: Position


@dataclass(frozen=True)
class Places:
    """Where a unit is used: positions of COPY slots, except the two issues. See [Note: Slot].

    `issue` is where its gather is issued, None for the step's first. `reduced` is where the next reduction begins.
    """

    issue: Position | None
    enter: Position | None
    leave: Position | None
    issue_again: Position | None
    enter_again: Position | None
    leave_again: Position | None
    reduced: Position
    finish: Position  # backward is done, the optimizer has not begun
    gradients: tuple[tuple[str, Position], ...]
    calls: int = 1  # in forward
    second: Position | None = None  # where a second forward enters it
    is_second: bool = False  # the step's first unit issues its gather
    late: bool = False  # of a block, but left when backward has ended; see [Note: Left at the end]

    @property
    def freed(self) -> Position:
        """Where backward frees its copy: frozen below the first gradient, when backward has ended."""
        return self.leave_again or self.finish

    @property
    def first_gradient(self) -> Position | None:
        return min((position for _, position in self.gradients), default=None)

    @property
    def is_unused(self) -> bool:
        """Whether backward leaves it without a gradient for any of its parameters."""
        return self.leave_again is not None and not self.gradients

    @property
    def gathers(self) -> list[tuple[Position, Position]]:
        """Gathers that are issued ahead: where, and where their unit is entered."""
        pairs = (self.issue, self.enter), (self.issue_again, self.enter_again)
        return [(issue, enter) for issue, enter in pairs if issue is not None and enter is not None]


class Growth(NamedTuple):
    """A hold that grows with the batch size."""

    nbytes: Affine
    start: Position
    end: Position


def unit_allocations(
    unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """All that a unit's option holds in a step; affine in `option.sharded` from 1 on."""
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
    if unit.trained and places.leave_again is not None:
        allocations += _reduction(option, sizes, places, training, cluster)
    if places.late:
        assert places.leave_again is not None
        lasting = (places.leave_again <= hold.end < places.finish for hold in allocations)
        allocations = [
            h._replace(end=places.finish) if lasts else h for h, lasts in zip(allocations, lasting, strict=True)
        ]
    return allocations


def _held(
    mode: ShardingMode, count: int, sizes: Sizes, option: Option, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """Parameters, states and, once reduced, gradients of `count` slices; and their copies between the passes."""
    master, compute = training.precision.master_bytes, training.precision.compute_bytes
    optimizer, used = training.optimizer, _used(sizes, places)
    states = optimizer.states * sum(used) * master + optimizer.counters * len(used)
    allocations = [Allocation(PARAMETERS, count * sizes.held * master, START, END)]
    if places.leave_again is not None:
        allocations.append(Allocation(STATES, count * states, START, END))
        deferred = option.defers(mode) and training.accumulation > 1
        allocations += _gradients(count, sizes, option, places, training, cluster, deferred=deferred)
    if places.leave is None:
        return allocations
    again = places.enter_again or places.freed
    if mode.is_kept:
        # Kept slices gather up while the operator runs; between the passes they are the whole unit.
        begin, end = (places.leave, again) if option.slices == 1 else (places.enter, places.freed)
        allocations.append(Allocation(GATHERED, count * sizes.gathered * compute, begin or places.leave, end))
    elif mode.is_sharded_anew:
        shard = -(-sizes.gathered // cluster.devices_per_node) * compute
        allocations.append(Allocation(GATHERED, count * shard, places.leave.next(), again.next()))
    return allocations


def _used(sizes: Sizes, places: Places) -> list[int]:
    """A rank's elements of every parameter that gets a gradient: the optimizer steps these alone."""
    reached = {name for name, _ in places.gradients}
    return [numel for name, numel in sizes.shards if name in reached]


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
    gradient, leave = count * sizes.trained * training.precision.master_bytes, places.leave_again
    assert leave is not None
    if deferred:
        return _partly_reduced(count * sizes.trained, option, places, leave, training, cluster)
    if places.is_unused:
        return [Allocation(GRADIENTS, gradient, leave.next(), places.finish)]
    if training.accumulation == 1:
        sliced = places.first_gradient if option.slices > 1 else None  # reduced one by one, inside the operator
        return [Allocation(GRADIENTS, gradient, sliced or leave.next(), END)]
    if not option.reduce_once:  # from the second micro-batch on they are always there
        return [Allocation(GRADIENTS, gradient, START, END)]
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
    """Where forward issues a gather: on asynchronous gloo, as the unit before is entered; see [Note: Prefetch]."""
    issue = places.issue
    if issue is None or places.is_second or not cluster.engine.gathers_before_waiting:
        return issue
    return Position(issue.visit, issue.slot - ISSUE + COPY)


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
    allocations = [Allocation(GATHERED, copy, entered, places.leave)]
    if mode.is_sharded_anew and slices == 1:  # its own part is cloned before the copy is freed
        extra = sizes.clone_extra(cluster.devices_per_node) * compute
        allocations.append(Allocation(GATHERED, copy + extra, places.leave, places.leave.next()))
    column = _column_bytes(option, sizes, training, cluster)
    issue = forward_issue(places, cluster)
    return allocations + _gather(mode, slices, sizes, sizes.held, column, issue, entered, places.leave, training)


def _column_bytes(option: Option, sizes: Sizes, training: Training, cluster: Cluster) -> int:
    """What a gather on two levels holds on its way; see [Note: Two levels] in osdp.runtime.collectives."""
    exchanged = sizes.gathered // cluster.devices_per_node if option.crosses(option.mode) else 0
    return exchanged * training.precision.compute_bytes


def _gather(
    mode: ShardingMode,
    slices: int,
    sizes: Sizes,
    sent: int,
    column_bytes: int,
    issue: Position | None,
    enter: Position,
    leave: Position,
    training: Training,
) -> list[Allocation]:
    """The buffers of one gather: its output, and the cast of what this rank sends; see [Note: Prefetch]."""
    compute = training.precision.compute_bytes
    if not mode.is_sharded:  # nothing is sent; a cast is made parameter by parameter
        return (
            [Allocation(BUFFERS, sizes.cast_extra * compute, enter, enter.next())] if training.precision.casts else []
        )
    output = sizes.gathered * compute
    allocations = [Allocation(BUFFERS, output, issue or enter, enter.next())]
    if training.precision.casts and issue is not None:
        allocations.append(Allocation(BUFFERS, sent * compute, issue, issue.next()))
    if column_bytes and issue is not None:
        allocations.append(Allocation(BUFFERS, column_bytes, issue, enter))
    if slices > 1:  # while a slice computes, the next one is gathered
        allocations.append(Allocation(BUFFERS, output, enter.next(), leave))
    if sizes.moved:  # put in order through a temporary; see [Note: Shard dimension]
        allocations.append(Allocation(GATHERED, sizes.moved * compute, enter, enter.next() if slices == 1 else leave))
    return allocations


def _backward(option: Option, sizes: Sizes, places: Places, training: Training, cluster: Cluster) -> list[Allocation]:
    mode, slices = option.mode, option.slices
    compute = training.precision.compute_bytes
    if _computes_in_place(mode, training):
        return []
    copy, freed = sizes.gathered * compute, places.freed
    if places.enter_again is None:
        return _gathered_in_vain(mode, sizes, places, training, cluster)
    allocations = [Allocation(GATHERED, copy, places.enter_again, freed)]
    if len(places.gradients) < len(sizes.gradients):  # zeros are made for some while the copy is there, not the input
        beyond_input = max(0, copy - sizes.reduced * training.reduce_bytes)
        allocations.append(Allocation(GATHERED, beyond_input, freed, freed.next()))
    if not mode.is_kept:
        in_node = mode.is_sharded_anew
        sent = sizes.gathered // cluster.devices_per_node if in_node else sizes.held
        column = 0 if in_node else _column_bytes(option, sizes, training, cluster)
        ahead = freed  # up to where the next slice's gather is held
        if slices == 2 and training.reduce_bytes >= compute:
            # of two, the one that computes beside the other's reduction has no slice after it
            ahead = places.first_gradient or ahead
        allocations += _gather(
            mode, slices, sizes, sent, column, places.issue_again, places.enter_again, ahead, training
        )
    return allocations


def _gathered_in_vain(
    mode: ShardingMode, sizes: Sizes, places: Places, training: Training, cluster: Cluster
) -> list[Allocation]:
    """The gather of a unit that backward never reaches, issued by the one before it: FSDP2 frees it in the end."""
    issue, compute = places.issue_again, training.precision.compute_bytes
    if issue is None or not mode.is_gathered_again:
        return []
    sent = sizes.gathered // cluster.devices_per_node if mode.is_sharded_anew else sizes.held
    cast = [Allocation(BUFFERS, sent * compute, issue, issue.next())] if training.precision.casts else []
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
    assert places.leave_again is not None
    mode, leave = option.mode, places.leave_again
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
        allocations.append(Allocation(BUFFERS, max(0, sizes.reduced * reduce - beside), freed, freed.next()))
        begin = begin.next()  # only then room is made for what arrives
    once, sent = _is_reduced_once(option, sizes, places, training), sizes.reduced * reduce
    allocations.append(Allocation(BUFFERS, sent, entry, copied if once and mode.is_sharded else freed))
    if once and mode.is_sharded:
        # The last micro-batch has the input and the result where the earlier ones have the unreduced gradients.
        gradient, waiting = sizes.trained * master, _unreduced_bytes(sizes, training)
        allocations.append(Allocation(BUFFERS, max(0, sent + gradient - max(waiting, gradient)), copied, freed))
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
    lasting = _holds_all_reduce(mode, cluster)
    if reduce != master:
        allocations.append(Allocation(BUFFERS, result, leave.next(), places.finish if lasting else leave.next().next()))
    if training.accumulation > 1 and not deferred and not once:
        allocations.append(
            _added(option, sizes, places, ended if under_way else leave.next().next(), training, cluster)
        )
    return allocations


def _added(
    option: Option, sizes: Sizes, places: Places, ended: Position, training: Training, cluster: Cluster
) -> Allocation:
    """A result that is added to that of earlier micro-batches; reduced once there is none, and room to spare."""
    assert places.leave_again is not None
    master, mode = training.precision.master_bytes, option.mode
    makes_zeros = len(places.gradients) < len(sizes.gradients)  # they are views of the result, dropped in the end
    is_first = option.reduce_once or option.defers(mode)
    lasting = _holds_all_reduce(mode, cluster) and training.reduce_bytes == master and not is_first
    end = places.finish if makes_zeros or lasting else ended
    return Allocation(BUFFERS, sizes.trained * master, places.leave_again.next(), end)


def _room(option: Option, sizes: Sizes, cluster: Cluster) -> int:
    """Elements that an asynchronous reduction has room for beside its input and its result."""
    if not option.mode.is_sharded:
        return -(-sizes.trained // cluster.world_size) if cluster.world_size > 1 else 0
    return sizes.trained + (sizes.reduced // cluster.devices_per_node if option.crosses(option.mode) else 0)


def _own_gradients(
    option: Option, sizes: Sizes, places: Places, entry: Position, copied: Position, training: Training
) -> list[Allocation]:
    """A unit's gradients, each from its kernel on until all are copied in, from `entry` to `copied`."""
    compute, numels = training.precision.compute_bytes, dict(sizes.gradients)
    held_longer: list[str] = []
    if option.mode.is_sharded and copied != places.leave_again:  # of slices none outlives the operator
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


def slice_growths(unit: Unit, option: Option, places: Places, operators: Mapping[str, Operator]) -> list[Growth]:
    """What a split operator's activations need beside those of the whole one; see [Note: Slices' activations]."""
    if option.slices == 1 or places.enter is None or places.leave is None or places.enter.visit != places.leave.visit:
        return []
    operator = operators[unit.name]
    shape = next(p.shape for p in unit.parameters if len(p.shape) > 1)
    outputs, inputs = shape[unit.split_dim], shape[1 - unit.split_dim]
    sliced = -(-outputs // option.slices)
    growths = [Growth(_per_call(operator, sliced, outputs), places.enter.next().next(), places.leave)]
    if places.second is not None:
        begin = places.second.next().next()
        growths.append(Growth(_per_call(operator, sliced, outputs), begin, begin.next()))
    first, leave = places.first_gradient, places.leave_again
    takes_tokens = operator.kind == "Embedding"  # they have no gradient
    if first is not None and leave is not None and leave.visit == first.visit and not takes_tokens:
        growths.append(Growth(_per_call(operator, inputs, outputs), first, leave))
    return growths


def _per_call(operator: Operator, part: int, outputs: int) -> Affine:
    """The bytes of one call's output if it had `part` features in place of `outputs`."""
    whole = operator.output_bytes
    return Affine(*(each * part // (outputs * operator.calls) for each in (whole.constant, whole.per_sample)))


def stepping_bytes(unit: Unit, option: Option, places: Places, training: Training, cluster: Cluster) -> int:
    """Bytes that the optimizer needs for a unit only while it steps."""
    held = sum(count * sum(_used(unit.sizes(mode, cluster, option.slices), places)) for mode, count in option.held)
    return training.optimizer.temporaries * training.precision.master_bytes * held
