"""A rank's meter and clock, and the log of what they found."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as dist

from osdp.training.world import World

from .cells import Setting
from .job import Job, Trainer
from .ladder import Attempt
from .log import Log
from .meter import Meter
from .models import batch_of

TRIAL_STEPS = 1  # timed, after one that is not
SHORT_SECONDS = 0.25  # shorter steps are repeated until so long has passed, a few times at most
MOST_STEPS = 3
PEAK_STEPS = 2  # the first makes the optimizer's states, the second has its peak with them

Build = Callable[[], Trainer]


class OutOfTime(Exception):
    """The seconds of this run are over; the next goes on from here."""


class Bench:
    """Figures are those of the slowest and of the fullest rank, equal on all."""

    def __init__(self, setting: Setting, world: World, log: Log, *, seconds: float) -> None:
        self.setting, self.world, self.log, self.meter = setting, world, log, Meter()
        self.job = partial(Job, setting.shape, setting.hosts, setting.ranks_per_host)
        self._began, self._seconds = perf_counter(), seconds
        self._until = self._began + seconds

    def highest(self, *numbers: float) -> list[float]:
        return [max(column) for column in zip(*self.world.all_numbers(*numbers), strict=True)]

    def check_time(self) -> None:
        (late,) = self.highest(perf_counter() - self._until)
        if late > 0:
            raise OutOfTime

    @contextmanager
    def until(self, share: float) -> Iterator[None]:
        """Leaves the rest of this run's seconds to what follows: what is not done then waits for the next run."""
        self._until = self._began + share * self._seconds
        try:
            yield
        except OutOfTime:
            self.log.add("stopped", why=f"{share:.0%} of {self._seconds:.0f} s are over")
        finally:
            self._until = self._began + self._seconds

    def made(self, build: Build) -> tuple[Trainer, Any]:
        trainer = build()
        return trainer, batch_of(self.setting.shape, trainer.samples, seed=1 + trainer.part)

    def trial(self, batch: int, build: Build) -> Attempt:
        """Builds it and times a few steps."""
        self._begin()
        trainer, data = self.made(build)
        trainer.step(*data)
        seconds: list[float] = []
        while len(seconds) < TRIAL_STEPS or (sum(seconds) < SHORT_SECONDS and len(seconds) < MOST_STEPS):
            seconds.append(self.timed(trainer, data))
        return self._attempt(batch, trainer, min(seconds))

    def peak(self, batch: int, build: Build) -> Attempt:
        """Builds it and takes two steps, for their memory alone."""
        self._begin()
        return self._peak(batch, build)

    def limited(self, batch: int, build: Build, limit_bytes: int) -> Attempt:
        """The same as on a device that has no more."""
        self._begin()
        with self.meter.limited(limit_bytes):
            return self._peak(batch, build)

    def timed(self, trainer: Trainer, data: Any) -> float:
        """Seconds of a step that all ranks begin and end together.

        Ranks that share cores leave a barrier one after the other: a step without collectives would be over on some
        before it begins on others, and each would seem to have the cores to itself.
        """
        dist.barrier()
        began = perf_counter()
        trainer.step(*data)
        dist.barrier()
        (slowest,) = self.highest(perf_counter() - began)
        return slowest

    def _begin(self) -> None:
        self.check_time()
        gc.collect()
        self.meter.begin()

    def _peak(self, batch: int, build: Build) -> Attempt:
        trainer, data = self.made(build)
        for _ in range(PEAK_STEPS):
            trainer.step(*data)
        return self._attempt(batch, trainer, None)

    def _attempt(self, batch: int, trainer: Trainer, seconds: float | None) -> Attempt:
        (peak,) = self.highest(self.meter.peak_bytes)
        return Attempt(batch, trainer.samples * trainer.parts, seconds, int(peak))


def figures(attempt: Attempt) -> dict[str, Any]:
    return asdict(attempt)
