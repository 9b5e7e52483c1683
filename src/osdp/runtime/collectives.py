"""The collectives of a plan on a backend without streams: FSDP2's custom communication, in threads of its own.

[Note: Reduce-scatter]
gloo's own reduce-scatter sends as much as an all-reduce, twice what it must. Here parts go round in a ring: every rank
adds its own to what its left neighbour sends and passes the sum on, so that part r arrives complete at rank r. That is
the traffic of a reduce-scatter, for room for one more part.

[Note: Ring]
gloo sends only when the receiver has said that it is ready, and says so behind whatever it sends to the same peer. So
receives are posted before anything is sent, and each part goes in pieces: while one is added, the next is on its way.
gloo's own all-gather and all-to-all do neither, and leave a fifth to a half of a slow link unused. An all-reduce is a
reduce-scatter in place and a gather of what it gave.

[Note: Two levels]
Rank r = node * D + d holds part r. To gather over both levels, ranks with the same d exchange their parts across nodes
(a column), then each node gathers every column's part of one node at a time, which puts the parts in their order with
no copy. To reduce-scatter over both levels the same is done backwards. The network then carries (H-1)/H of the bytes
where a flat ring over H nodes carries (H*D-1)/(H*D).

[Note: Deferred all-reduce]
Where several micro-batches make a step, gradients can be reduce-scattered in the node at each of them and all-reduced
across nodes once, in the last: the network carries them once a step, and a rank holds a shard, not a whole gradient.
FSDP2 keeps that shard itself on a mesh of several nodes (its `partial_reduce_output`). Here the mesh is the node's
(see [Note: Engines]): the shard is the unit's `partial`, into which every micro-batch's result is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp._torch.fsdp import AllGather, FSDPParamGroup, ReduceAfterLastCall, ReduceScatter
from osdp.cost.time_model import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from osdp.runtime.async_comm import Bucket, CommThreads, CommWork, Groups, Job, Reductions
from osdp.runtime.collective_recorder import issue

PIECES = 2  # of a part on its way; see [Note: Ring]
SMALL_BYTES = 1 << 16  # parts up to here are one piece: each further message costs more CPU than it saves time


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AsyncAllGather(_Allocates, AllGather):
    """An all-gather by communication threads, flat or over two levels."""

    def __init__(self, comm_threads: CommThreads, *, two_levels: bool, experts: bool = False) -> None:
        self._courier, self._two_levels, self._experts = comm_threads, two_levels, experts

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> CommWork | None:
        groups = self._courier.groups.of(experts=self._experts)
        held: tuple[Tensor, ...] = (output_tensor,)
        if self._two_levels and groups.two_levels and groups.like(group) is groups.world:
            column = input_tensor.new_empty(groups.across.size() * input_tensor.numel())
            job: Job = partial(gather_two_levels, output_tensor, input_tensor, column)
            held = output_tensor, column
        else:
            job = lambda own: gather(output_tensor, input_tensor, own.like(group))  # noqa: E731
        delivery = self._courier.send(_among(job, experts=self._experts), *held)
        if async_op:
            return delivery
        delivery.wait()
        return None


class AsyncReduceScatter(_Allocates, ReduceScatter):
    """A mean over all ranks: scattered over the world, or in the node and then all-reduced across nodes."""

    def __init__(
        self,
        reductions: Reductions,
        groups: Groups,
        unit: FSDPParamGroup,
        *,
        two_levels: bool,
        experts: bool = False,
    ) -> None:
        assert isinstance(unit, ReduceAfterLastCall)
        self._reductions, self._unit, self._two_levels = reductions, unit, two_levels
        self._groups, self._experts = groups.of(experts=experts), experts
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, copies gradients in, then asks for the output."""
        if self.input is not None and (partial := self._unit.partial) is not None:
            return partial
        made = super().allocate(size, dtype=dtype, device=device)
        if self.input is None:
            self.input = made
        return made

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.input = None
        groups, arrived = self._groups, torch.empty_like(output_tensor)
        held: tuple[Tensor, ...] = input_tensor, arrived
        if groups.two_levels and groups.like(group) is groups.node:
            added = None if self._unit.partial is None else torch.empty_like(output_tensor)
            is_whole = self._unit.all_reduce_grads
            job: Job = partial(_reduce_in_node, output_tensor, input_tensor, arrived, added, is_whole)
            held = (*held, output_tensor) if added is None else (*held, output_tensor, added)
            self._unit.partial = None if is_whole else output_tensor
        elif groups.two_levels and self._two_levels:
            column = input_tensor.new_empty(groups.across.size() * output_tensor.numel())
            job, held = partial(scatter_two_levels, output_tensor, input_tensor, arrived, column), (*held, column)
        else:
            job = partial(_scatter_over, output_tensor, input_tensor, arrived, group)
        job = _among(job, experts=self._experts)
        self._reductions.start(job, _parameters(self._unit), *held, wait=_is_cast(output_tensor, self._unit))


class AsyncAllReduce:
    """FSDP2's hook after a reduction: the mean of a replicated unit's gradients over all ranks.

    The reduction before it, `copying`, is over one rank: only its buffers are used.
    """

    def __init__(
        self,
        reductions: Reductions,
        groups: Groups,
        unit: FSDPParamGroup,
        copying: AsyncReduceScatter,
        bucket: Bucket | None,
        *,
        experts: bool = False,
    ) -> None:
        self._reductions, self._unit, self._copying = reductions, unit, copying
        self._groups, self._experts, self._bucket = groups.of(experts=experts), experts, bucket

    def __call__(self, gradient: Tensor) -> None:
        copied, self._copying.input = self._copying.input, None
        assert copied is not None
        copied.untyped_storage().resize_(0)  # FSDP2 would hold it, empty of use, until the next reduction
        parameters = _parameters(self._unit)
        if self._bucket is not None and not _is_cast(gradient, self._unit):
            self._reductions.join(self._bucket, gradient, parameters)
            return
        ranks = self._groups.world.size()
        arrived = gradient.new_empty(-(-gradient.numel() // ranks) if ranks > 1 else 0)
        job = _among(lambda own: average(gradient, arrived, own.world, own.samples), experts=self._experts)
        self._reductions.start(job, parameters, arrived, wait=_is_cast(gradient, self._unit))


def pack(gradients: list[Tensor], ranks: int) -> tuple[Job, tuple[Tensor, ...], Callable[[], None]]:
    """Several units' gradients as one buffer, with the job that averages it, and what copies them back."""
    whole = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    torch.cat(gradients, out=whole)
    arrived = whole.new_empty(-(-whole.numel() // ranks) if ranks > 1 else 0)

    def unpack() -> None:
        for gradient, part in zip(gradients, whole.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part)

    return lambda own: average(whole, arrived, own.world, ranks), (arrived,), unpack


def _among(job: Job, *, experts: bool) -> Job:
    """A job of a unit of experts is given the groups of the ranks that hold the same ones."""
    return (lambda own: job(own.of(experts=True))) if experts else job


def _parameters(unit: FSDPParamGroup) -> list[nn.Parameter]:
    return [param.sharded_param for param in unit.fsdp_params]


def _is_cast(reduced: Tensor, unit: FSDPParamGroup) -> bool:
    """Whether FSDP2 casts the reduction's result at once, so that it must be there."""
    return reduced.dtype != unit._orig_dtype


def gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's part in every rank's output; see [Note: Ring]."""
    issue(ALL_GATHER, group, output)
    if dist.get_backend(group) != dist.Backend.GLOO:
        dist.all_gather_single(output, part, group)
        return
    own = output.tensor_split(group.size())[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    _gather_in_place(output, group)


def _gather_in_place(output: Tensor, group: dist.ProcessGroup) -> None:
    ranks, rank = group.size(), group.rank()
    parts = _parts(output, ranks)
    arriving = {}
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step) % ranks]):
            tag = step * PIECES + index
            arriving[tag] = _receive(piece, group, tag)
    sent = []
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step + 1) % ranks]):
            if step > 1:
                _wait(arriving.pop((step - 1) * PIECES + index))
            sent.append(_send(piece, group, step * PIECES + index))
    for work in (*arriving.values(), *sent):
        _wait(work)


def _parts(whole: Tensor, ranks: int) -> list[tuple[Tensor, ...]]:
    """Every rank's part, as equal as can be, in its pieces."""
    pieces = _pieces(whole, ranks)
    return [part.tensor_split(pieces) for part in whole.tensor_split(ranks)]


def _pieces(whole: Tensor, ranks: int) -> int:
    return 1 if whole.nbytes <= SMALL_BYTES * ranks else PIECES


def gather_two_levels(output: Tensor, part: Tensor, column: Tensor, groups: Groups) -> None:
    gather(column, part, groups.across)
    nodes = groups.across.size()
    for whole, own in zip(output.chunk(nodes), column.chunk(nodes), strict=True):
        gather(whole, own, groups.node)


def _scatter(output: Tensor, whole: Tensor, arrived: Tensor, group: dist.ProcessGroup) -> None:
    """See [Note: Reduce-scatter] and [Note: Ring]; `whole` is used up."""
    issue(REDUCE_SCATTER, group, whole)
    if dist.get_backend(group) != dist.Backend.GLOO:
        dist.reduce_scatter_single(output, whole, group=group)
        return
    _ring_scatter(output, whole, arrived, group)


def _ring_scatter(output: Tensor, whole: Tensor, arrived: Tensor, group: dist.ProcessGroup) -> None:
    ranks, rank = group.size(), group.rank()
    parts, pieces = _parts(whole, ranks), _pieces(whole, ranks)
    room = arrived.tensor_split(pieces)

    def receive(step: int, index: int) -> tuple[Tensor, dist.Work | None]:
        """A piece of the part that this rank sends on in the next step."""
        piece = room[index][: parts[(rank - step - 1) % ranks][index].numel()]
        return piece, _receive(piece, group, step * PIECES + index)

    arriving = [receive(1, index) for index in range(pieces)]
    sent = []
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step) % ranks]):
            if step > 1:  # it is complete up to here once the left neighbour's has been added
                came, work = arriving[index]
                _wait(work)
                piece.add_(came)
                arriving[index] = receive(step, index)
            sent.append(_send(piece, group, step * PIECES + index))
    for piece, (came, work), place in zip(parts[rank], arriving, output.tensor_split(pieces), strict=True):
        _wait(work)
        torch.add(piece, came, out=place)
    for work in sent:
        _wait(work)


def _send(piece: Tensor, group: dist.ProcessGroup, tag: int) -> dist.Work | None:
    if piece.numel() == 0:
        return None
    return dist.isend(piece, group=group, group_dst=(group.rank() + 1) % group.size(), tag=tag)


def _receive(piece: Tensor, group: dist.ProcessGroup, tag: int) -> dist.Work | None:
    if piece.numel() == 0:
        return None
    return dist.irecv(piece, group=group, group_src=(group.rank() - 1) % group.size(), tag=tag)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def scatter_and_average(
    output: Tensor, whole: Tensor, arrived: Tensor, group: dist.ProcessGroup, ranks: int = 0
) -> None:
    """The sum over a group, by the number of its ranks or by another one."""
    _scatter(output, whole, arrived, group)
    output.div_(ranks or group.size())


def _scatter_over(output: Tensor, whole: Tensor, arrived: Tensor, like: dist.ProcessGroup, groups: Groups) -> None:
    scatter_and_average(output, whole, arrived, groups.like(like), groups.samples)


def _reduce_in_node(
    output: Tensor, whole: Tensor, arrived: Tensor, added: Tensor | None, is_whole: bool, groups: Groups
) -> None:
    """Into `output`, or with `added`, a place for this result, on top of it; across nodes too where it `is_whole`."""
    _scatter(output if added is None else added, whole, arrived, groups.node)
    if added is not None:
        output.add_(added)
    if is_whole:
        average(output, arrived, groups.across, groups.samples)


def scatter_two_levels(output: Tensor, whole: Tensor, arrived: Tensor, column: Tensor, groups: Groups) -> None:
    nodes = groups.across.size()
    for part, own in zip(whole.chunk(nodes), column.chunk(nodes), strict=True):
        _scatter(own, part, arrived, groups.node)
    _scatter(output, column, arrived, groups.across)
    output.div_(groups.samples)


def average(tensor: Tensor, arrived: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
    """The sum over a group, by the number of all ranks; `arrived` has room for a rank's part."""
    issue(ALL_REDUCE, group, tensor)
    if dist.get_backend(group) != dist.Backend.GLOO:
        dist.all_reduce(tensor, group=group)
    elif group.size() > 1:
        _ring_scatter(tensor.tensor_split(group.size())[group.rank()], tensor, arrived, group)
        _gather_in_place(tensor, group)
    tensor.div_(ranks)
