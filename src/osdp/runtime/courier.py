"""Carries out collectives beside the computation, where the backend has no streams for it (gloo).

[Note: Courier]
One thread runs the collectives of a step one after another, in the order in which they were given; all ranks give them
in the same order, so they meet. It has process groups of its own: what the user sends meanwhile cannot mix with it.
Buffers are made when a collective is given and freed when it is finished, both by the thread that trains, so what is
held when does not depend on how fast the network is.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.runtime.local import local_tensor

Job = Callable[[], None]


class Delivery(dist.Work):
    """One collective under way; FSDP2 waits for it as for any other work."""

    def __init__(self, job: Job, held: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self._job: Job | None = job
        self._held = held
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._job is not None
        try:
            self._job()
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
    """The thread of [Note: Courier]; `inline` runs every job where it is given, for worlds that are not real."""

    def __init__(self, *, inline: bool) -> None:
        self._queue: queue.SimpleQueue[Delivery] | None = None
        if not inline:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queue,), name="osdp-courier", daemon=True).start()

    def send(self, job: Job, *held: Tensor) -> Delivery:
        """Gives a job; the tensors of `held` live until it was waited for."""
        delivery = Delivery(job, held)
        if self._queue is None:
            delivery.run()
        else:
            self._queue.put(delivery)
        return delivery

    @staticmethod
    @torch.no_grad()
    def _run(jobs: queue.SimpleQueue[Delivery]) -> None:
        while True:
            jobs.get().run()


@dataclass
class _Reduction:
    delivery: Delivery
    bounded: bool  # it holds buffers of its own
    earlier: list[tuple[nn.Parameter, Tensor]]  # gradients of micro-batches before, to which this one is added


class Reductions:
    """The reductions under way, at most `limit` of those that hold buffers; all are finished when backward is."""

    def __init__(self, courier: Courier, *, limit: int) -> None:
        self._courier, self._limit = courier, limit
        self._under_way: deque[_Reduction] = deque()

    def make_room(self) -> None:
        """Waits until one more reduction may begin; called before its buffers are made."""
        while sum(reduction.bounded for reduction in self._under_way) >= self._limit:
            self._finish(self._under_way.popleft())

    def start(self, job: Job, parameters: Sequence[nn.Parameter], *held: Tensor, wait: bool) -> None:
        """Begins a reduction of the parameters' gradients; with `wait`, ends it too."""
        delivery = self._courier.send(job, *held)
        if wait:
            delivery.wait()
            return
        earlier = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None  # else FSDP2 would add the result now, before it is there
        self._under_way.append(_Reduction(delivery, bool(held), earlier))
        # Each asks for the end: a flag would stay behind where backward fails.
        torch.autograd.Variable._execution_engine.queue_callback(self.finish_all)  # type: ignore[attr-defined]

    def run(self, job: Job) -> None:
        """A collective that is no reduction, in its turn, to its end."""
        self._courier.send(job).wait()

    def finish_all(self) -> None:
        while self._under_way:
            self._finish(self._under_way.popleft())

    @torch.no_grad()
    def _finish(self, reduction: _Reduction) -> None:
        reduction.delivery.wait()
        for parameter, earlier in reduction.earlier:
            if parameter.grad is not None:
                local_tensor(earlier).add_(local_tensor(parameter.grad))
            parameter.grad = earlier
