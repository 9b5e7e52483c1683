"""Carries out collectives beside the computation, where the backend has no streams for it (gloo).

[Note: CommThreads]
Two threads take the collectives of a step in turns, each in the order in which they were given; all ranks give them in
the same order, so they meet. While one collective waits for a neighbour that is late, the other uses the link. Each
thread has process groups of its own: what the other, or the user, sends meanwhile cannot mix with it. Buffers are made
when a collective is given and freed when it is finished, both by the thread that trains, so what is held when does not
depend on how fast the network is.

[Note: Ends]
Freeing a collective's work object gives up the interpreter's lock for a moment. A thread that asks for it back when the
interpreter is already being finalized is ended by Python in the middle of a C++ destructor, and the process aborts with
"terminate called without an active exception". So no thread may be there then: a process waits for them before.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp._torch.fsdp import when_backward_ends
from osdp.errors import OsdpError
from osdp.runtime.collective_recorder import take_turn
from osdp.runtime.local import local_tensor

CLOSING_SECONDS = 5.0  # for collectives under way; a peer that is gone ends them sooner


@dataclass(frozen=True)
class Groups:
    """Process groups of the communication threads: all ranks, those of this node, those at this place in every node.

    Gradients are divided by the number of ranks whose samples they are of, `samples`. Of experts over a dimension of
    their own, `experts` has the groups of the ranks that hold the same ones.
    """

    world: dist.ProcessGroup
    node: dist.ProcessGroup
    across: dist.ProcessGroup
    samples: int
    experts: Groups | None = None

    def of(self, *, experts: bool) -> Groups:
        found = self.experts if experts else self
        assert found is not None
        return found

    @property
    def two_levels(self) -> bool:
        return self.node.size() > 1 and self.across.size() > 1

    def like(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The one with the ranks of another group."""
        ranks = dist.get_process_group_ranks(group)
        return next(own for own in (self.world, self.node) if dist.get_process_group_ranks(own) == ranks)


Job = Callable[[Groups], None]


class CommWork(dist.Work):
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


class CommThreads:
    """The threads of [Note: CommThreads], one for each of `lanes`; `inline` runs every job where it is given instead.

    Threads start with the first job and end when no model uses them any more, or with the process group or the process:
    see [Note: Ends].
    """

    def __init__(self, lanes: Sequence[Groups], *, inline: bool = False) -> None:
        self.groups = lanes[0]  # what they all look like
        self._lanes = () if inline else tuple(lanes)
        self._queues: list[queue.SimpleQueue[CommWork | None]] = [queue.SimpleQueue() for _ in self._lanes]
        self._is_running = False
        self._given = self._users = 0
        self._is_closed = False

    def used_by(self, user: object) -> None:
        """Lets the threads end when the last of its users is freed."""
        self._users += 1
        weakref.finalize(user, self._left)

    def send(self, job: Job, *held: Tensor) -> CommWork:
        """Gives a job; the tensors of `held` live until it was waited for."""
        if self._is_closed:
            raise OsdpError("the process group was destroyed, and the model cannot run without it; destroy it last")
        delivery = CommWork(self._given, job, held)
        if self._queues:
            self._queues[self._given % len(self._queues)].put(delivery)
            if not self._is_running:  # asked after the job is given: what ends them meanwhile is behind it
                self._start()
        else:
            delivery.run(self.groups)
        self._given += 1
        return delivery

    def close(self) -> None:
        """Ends the threads, after what they were given, and takes nothing more."""
        self._is_closed = True
        self._end()

    def _left(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._end()

    def _start(self) -> None:
        self._is_running = True
        _started[:] = [(jobs, thread) for jobs, thread in _started if thread.is_alive()]
        for jobs, groups in zip(self._queues, self._lanes, strict=True):
            thread = threading.Thread(target=self._run, args=(jobs, groups), name="osdp-comm", daemon=True)
            thread.start()
            _started.append((jobs, thread))

    def _end(self) -> None:
        is_running, self._is_running = self._is_running, False
        for jobs in self._queues if is_running else ():
            jobs.put(None)

    @staticmethod
    @torch.no_grad()
    def _run(jobs: queue.SimpleQueue[CommWork | None], groups: Groups) -> None:
        while (delivery := jobs.get()) is not None:
            delivery.run(groups)
            del delivery  # else it lives until the next one comes


_started: list[tuple[queue.SimpleQueue[CommWork | None], threading.Thread]] = []  # threads that may still be there


@atexit.register
def _end_all() -> None:
    """Waits until every thread has done what it was given, as long as a process may at its end."""
    until = time.monotonic() + CLOSING_SECONDS
    for jobs, _ in _started:
        jobs.put(None)
    for _, thread in _started:
        thread.join(max(0.0, until - time.monotonic()))


@dataclass
class _Reduction:
    delivery: CommWork
    parameters: set[nn.Parameter]
    earlier: list[tuple[nn.Parameter, Tensor]]  # gradients of micro-batches before, to which this one is added
    unpack: Callable[[], None] | None = None  # where it was of several units


Pack = Callable[[list[Tensor]], tuple[Job, tuple[Tensor, ...], Callable[[], None]]]  # a job, what it needs, its end


class Bucket:
    """Units whose gradients one reduction averages, so many `units`; see [Note: Joined reductions]."""

    def __init__(self, units: int, pack: Pack) -> None:
        self.units, self.pack = units, pack
        self.clear()

    def clear(self) -> None:
        self.left = 0  # units that backward has left
        self.gradients: list[Tensor] = []
        self.parameters: set[nn.Parameter] = set()
        self.earlier: list[tuple[nn.Parameter, Tensor]] = []


class Reductions:
    """The reduction under way: the one before it is finished once it has begun, and all are when backward is."""

    def __init__(self, comm_threads: CommThreads) -> None:
        self._courier = comm_threads
        self._under_way: _Reduction | None = None
        self._open: list[Bucket] = []  # that have gradients and are not under way
        comm_threads.used_by(self)

    def start(self, job: Job, parameters: Sequence[nn.Parameter], *held: Tensor, wait: bool) -> None:
        """Begins a reduction of the parameters' gradients; with `wait`, ends it too."""
        self._finish_of(parameters)
        delivery = self._courier.send(job, *held)
        if wait:
            delivery.wait()
            return
        earlier = _taken_away(parameters)
        self.finish_under_way()
        self._under_way = _Reduction(delivery, set(parameters), earlier)
        # Each asks for the end: a flag would stay behind where backward fails.
        when_backward_ends(self.finish)

    def join(self, bucket: Bucket, gradient: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Leaves a unit's gradients to a bucket, which is reduced when the last of its units is left."""
        self._finish_of(parameters)
        bucket.left += 1
        bucket.gradients.append(gradient)
        bucket.parameters.update(parameters)
        bucket.earlier += _taken_away(parameters)
        if bucket not in self._open:
            self._open.append(bucket)
        if bucket.left == bucket.units:
            self._reduce(bucket)
        when_backward_ends(self.finish)

    def _reduce(self, bucket: Bucket) -> None:
        self._open.remove(bucket)
        job, held, unpack = bucket.pack(bucket.gradients)
        delivery = self._courier.send(job, *held)
        self.finish_under_way()
        self._under_way = _Reduction(delivery, bucket.parameters, bucket.earlier, unpack)
        bucket.clear()

    def _finish_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """Ends reductions of a unit that backward leaves again: to what it gave before, this is added."""
        begun = [*self._open, *([self._under_way] if self._under_way is not None else [])]
        if not all(each.parameters.isdisjoint(parameters) for each in begun):
            self.finish()

    def abandon(self) -> None:
        """Waits for the reduction that is under way, if any, and leaves gradients as they are: its backward failed."""
        while self._open:
            self._open.pop().clear()
        reduction, self._under_way = self._under_way, None
        if reduction is not None:
            reduction.delivery.wait()

    def run(self, job: Job) -> None:
        """A collective that is no reduction, in its turn, to its end."""
        self._courier.send(job).wait()

    def finish(self) -> None:
        """Reduces what waits for units that backward has not left, and ends all."""
        while self._open:
            self._reduce(self._open[0])
        self.finish_under_way()

    @torch.no_grad()
    def finish_under_way(self) -> None:
        """Waits for the reduction that is under way, if any."""
        reduction, self._under_way = self._under_way, None
        if reduction is None:
            return
        reduction.delivery.wait()
        if reduction.unpack is not None:
            reduction.unpack()
        for parameter, earlier in reduction.earlier:
            if parameter.grad is not None:
                local_tensor(earlier).add_(local_tensor(parameter.grad))
            parameter.grad = earlier


def _taken_away(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Gradients of micro-batches before; FSDP2 would add the result to them now, before it is there."""
    earlier = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    return earlier
