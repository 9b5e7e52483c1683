"""Carries out collectives beside the computation, where the backend has no streams for it (gloo).

[Note: Courier]
Two threads take the collectives of a step in turns, each in the order in which they were given; all ranks give them in
the same order, so they meet. While one collective waits for a neighbour that is late, the other uses the link. Each
thread has process groups of its own: what the other, or the user, sends meanwhile cannot mix with it. Buffers are made
when a collective is given and freed when it is finished, both by the thread that trains, so what is held when does not
depend on how fast the network is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.runtime.local import local_tensor
from osdp.runtime.record import take_turn


@dataclass(frozen=True)
class Groups:
    """Process groups that only the courier uses: all ranks, those of this node, those at this place in every node."""

    world: dist.ProcessGroup
    node: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def two_levels(self) -> bool:
        return self.node.size() > 1 and self.across.size() > 1

    def like(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The one with the ranks of another group."""
        ranks = dist.get_process_group_ranks(group)
        return next(own for own in (self.world, self.node) if dist.get_process_group_ranks(own) == ranks)


Job = Callable[[Groups], None]


class Delivery(dist.Work):
    """One collective under way, the `number`th; FSDP2 waits for it as for any other work."""

    def __init__(self, number: int, job: Job, held: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._number = number
        self._job: Job | None = job
        self._held = held
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, groups: Groups) -> None:
        assert self._job is not None
        try:
            take_turn(self._number)
            self._job(groups)
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        self._job = None
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        self._held = ()
        if self._error is not None:
            raise self._error
        return True


class Courier:
    """The threads of [Note: Courier], one for each of `lanes`; `inline` runs every job where it is given instead."""

    def __init__(self, lanes: Sequence[Groups], *, inline: bool = False) -> None:
        self.groups = lanes[0]  # what they all look like
        self._given = 0
        self._queues: list[queue.SimpleQueue[Delivery]] = []
        for groups in () if inline else lanes:
            jobs: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(jobs, groups), name="osdp-courier", daemon=True).start()
            self._queues.append(jobs)

    def send(self, job: Job, *held: Tensor) -> Delivery:
        """Gives a job; the tensors of `held` live until it was waited for."""
        delivery = Delivery(self._given, job, held)
        if self._queues:
            self._queues[self._given % len(self._queues)].put(delivery)
        else:
            delivery.run(self.groups)
        self._given += 1
        return delivery

    @staticmethod
    @torch.no_grad()
    def _run(jobs: queue.SimpleQueue[Delivery], groups: Groups) -> None:
        while True:
            jobs.get().run(groups)


@dataclass
class _Reduction:
    delivery: Delivery
    earlier: list[tuple[nn.Parameter, Tensor]]  # gradients of micro-batches before, to which this one is added


class Reductions:
    """The reduction under way: the one before it is finished once it has begun, and all are when backward is."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._under_way: _Reduction | None = None

    def start(self, job: Job, parameters: Sequence[nn.Parameter], *held: Tensor, wait: bool) -> None:
        """Begins a reduction of the parameters' gradients; with `wait`, ends it too."""
        delivery = self._courier.send(job, *held)
        if wait:
            delivery.wait()
            return
        earlier = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None  # else FSDP2 would add the result now, before it is there
        self.finish()
        self._under_way = _Reduction(delivery, earlier)
        # Each asks for the end: a flag would stay behind where backward fails.
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]

    def run(self, job: Job) -> None:
        """A collective that is no reduction, in its turn, to its end."""
        self._courier.send(job).wait()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the reduction that is under way, if any."""
        reduction, self._under_way = self._under_way, None
        if reduction is None:
            return
        reduction.delivery.wait()
        for parameter, earlier in reduction.earlier:
            if parameter.grad is not None:
                local_tensor(earlier).add_(local_tensor(parameter.grad))
            parameter.grad = earlier
