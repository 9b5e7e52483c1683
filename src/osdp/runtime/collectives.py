"""The collectives of a plan on a backend without streams: FSDP2's custom communication, carried by a courier.

[Note: Reduce-scatter]
gloo's own reduce-scatter sends as much as an all-reduce, twice what it must. Here parts go round in a ring: every rank
adds its own to what its left neighbour sends and passes the sum on, so that part r arrives complete at rank r. That is
the traffic of a reduce-scatter, for room for one more part.

[Note: Ring]
gloo sends only when the receiver has said that it is ready, and says so behind whatever it sends to the same peer. So
receives are posted before anything is sent, and each part goes in pieces: while one is added, the next is on its way.
gloo's own all-gather and all-to-all do neither, and leave a fifth to a half of a slow link unused.

[Note: Two levels]
Rank r = node * D + d holds part r. To gather over both levels, ranks with the same d exchange their parts across nodes
(a column), then each node gathers every column's part of one node at a time, which puts the parts in their order with
no copy. To reduce-scatter over both levels the same is done backwards. The network then carries (H-1)/H of the bytes
where a flat ring over H nodes carries (H*D-1)/(H*D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp._torch.fsdp import AllGather, FSDPParamGroup, ReduceScatter
from osdp.cost.seconds import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from osdp.runtime.courier import Courier, Delivery, Reductions
from osdp.runtime.record import issue

PIECES = 2  # of a part on its way; see [Note: Ring]


@dataclass(frozen=True)
class Groups:
    """The courier's own process groups: all ranks, those of this node, and those at this place in every node."""

    world: dist.ProcessGroup
    node: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def two_levels(self) -> bool:
        return self.node.size() > 1 and self.across.size() > 1

    def like(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The courier's own group with the ranks of another one."""
        ranks = dist.get_process_group_ranks(group)
        return next(own for own in (self.world, self.node) if dist.get_process_group_ranks(own) == ranks)


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CarriedAllGather(_Allocates, AllGather):
    """An all-gather by courier, flat or over two levels."""

    def __init__(self, courier: Courier, groups: Groups, *, two_levels: bool) -> None:
        self._courier, self._groups, self._two_levels = courier, groups, two_levels

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Delivery | None:
        own = self._groups.like(group)
        if self._two_levels and own is self._groups.world and self._groups.two_levels:
            column = input_tensor.new_empty(self._groups.across.size() * input_tensor.numel())
            job = partial(_gather_two_levels, output_tensor, input_tensor, column, self._groups)
            delivery = self._courier.send(job, output_tensor, column)
        else:
            delivery = self._courier.send(partial(gather, output_tensor, input_tensor, own), output_tensor)
        if async_op:
            return delivery
        delivery.wait()
        return None


class CarriedReduceScatter(_Allocates, ReduceScatter):
    """A mean over all ranks by courier: scattered over the world, or in the node and then all-reduced across nodes."""

    def __init__(self, reductions: Reductions, groups: Groups, unit: FSDPParamGroup, *, two_levels: bool) -> None:
        self._reductions, self._groups, self._unit, self._two_levels = reductions, groups, unit, two_levels
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, copies gradients in, then asks for the output: only then it may have to wait."""
        if self.input is not None:
            self._reductions.make_room()
            return super().allocate(size, dtype=dtype, device=device)
        self.input = super().allocate(size, dtype=dtype, device=device)
        return self.input

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.input = None
        own, arrived = self._groups.like(group), torch.empty_like(output_tensor)
        if own is self._groups.node and self._groups.two_levels:
            job, held = partial(_reduce_in_node, output_tensor, input_tensor, arrived, self._groups), (arrived,)
        elif self._two_levels and self._groups.two_levels:
            column = input_tensor.new_empty(self._groups.across.size() * output_tensor.numel())
            job = partial(_scatter_two_levels, output_tensor, input_tensor, arrived, column, self._groups)
            held = (arrived, column)
        else:
            job, held = partial(scatter_and_average, output_tensor, input_tensor, arrived, own), (arrived,)
        wait = _is_cast(output_tensor, self._unit)
        self._reductions.start(job, _parameters(self._unit), input_tensor, *held, wait=wait)


class CarriedAllReduce:
    """FSDP2's hook after a reduction: the mean of a replicated unit's gradients over all ranks, by courier.

    The reduction before it, `copying`, is over one rank: only its buffers are used.
    """

    def __init__(
        self, reductions: Reductions, groups: Groups, unit: FSDPParamGroup, copying: CarriedReduceScatter
    ) -> None:
        self._reductions, self._groups, self._unit, self._copying = reductions, groups, unit, copying

    def __call__(self, gradient: Tensor) -> None:
        job = partial(average, gradient, self._groups.world, self._groups.world.size())
        copied, self._copying.input = self._copying.input, None
        assert copied is not None
        copied.untyped_storage().resize_(0)  # FSDP2 would hold it, empty of use, until the next reduction
        self._reductions.start(job, _parameters(self._unit), wait=_is_cast(gradient, self._unit))


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
    ranks, rank = group.size(), group.rank()
    parts = [each.chunk(PIECES) for each in output.chunk(ranks)]
    if parts[rank][0].data_ptr() != part.data_ptr():
        output.chunk(ranks)[rank].copy_(part)
    arriving = {}
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step) % ranks]):
            tag = step * PIECES + index
            arriving[tag] = dist.irecv(piece, group=group, group_src=(rank - 1) % ranks, tag=tag)
    sent = []
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step + 1) % ranks]):
            if step > 1:
                _wait(arriving.pop((step - 1) * PIECES + index))
            sent.append(dist.isend(piece, group=group, group_dst=(rank + 1) % ranks, tag=step * PIECES + index))
    for work in (*arriving.values(), *sent):
        _wait(work)


def _gather_two_levels(output: Tensor, part: Tensor, column: Tensor, groups: Groups) -> None:
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
    ranks, rank = group.size(), group.rank()
    parts = [each.chunk(PIECES) for each in whole.chunk(ranks)]
    room = arrived.chunk(PIECES)
    receive = partial(dist.irecv, group=group, group_src=(rank - 1) % ranks)
    arriving = [receive(piece, tag=PIECES + index) for index, piece in enumerate(room)]
    sent = []
    for step in range(1, ranks):
        for index, piece in enumerate(parts[(rank - step) % ranks]):
            if step > 1:  # it is complete up to here once the left neighbour's has been added
                _wait(arriving[index])
                piece.add_(room[index])
                arriving[index] = receive(room[index], tag=step * PIECES + index)
            sent.append(dist.isend(piece, group=group, group_dst=(rank + 1) % ranks, tag=step * PIECES + index))
    for piece, own, work, place in zip(parts[rank], room, arriving, output.chunk(PIECES), strict=True):
        _wait(work)
        torch.add(piece, own, out=place)
    for work in sent:
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def scatter_and_average(output: Tensor, whole: Tensor, arrived: Tensor, group: dist.ProcessGroup) -> None:
    _scatter(output, whole, arrived, group)
    output.div_(group.size())


def _reduce_in_node(output: Tensor, whole: Tensor, arrived: Tensor, groups: Groups) -> None:
    _scatter(output, whole, arrived, groups.node)
    average(output, groups.across, groups.world.size())


def _scatter_two_levels(output: Tensor, whole: Tensor, arrived: Tensor, column: Tensor, groups: Groups) -> None:
    nodes = groups.across.size()
    for part, own in zip(whole.chunk(nodes), column.chunk(nodes), strict=True):
        _scatter(own, part, arrived, groups.node)
    _scatter(output, column, arrived, groups.across)
    output.div_(groups.world.size())


def average(tensor: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
    issue(ALL_REDUCE, group, tensor)
    dist.all_reduce(tensor, group=group)
    tensor.div_(ranks)
