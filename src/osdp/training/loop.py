"""The loop: a plan, a model that runs it, data, and what is measured on the way."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import osdp
from osdp.errors import OsdpError, UsageError
from osdp.model.source import ModelSource
from osdp.planfile import Plan
from osdp.training.batches import Feed
from osdp.training.checkpointing import Checkpointing, CheckpointSettings
from osdp.training.data import Order, Windows
from osdp.training.drift import Timing
from osdp.training.failures import StopRequest, Watchdog
from osdp.training.memory import PeakMemory
from osdp.training.optimizer import Schedule, make_optimizer
from osdp.training.world import World

MOST_VALIDATION_BATCHES = 16
LEAST_SCALE = 1.0  # of fp16's loss: what overflows below it is not finite for another reason


@dataclass(frozen=True)
class Settings:
    """How a run is trained, beside its plan."""

    steps: int
    schedule: Schedule
    weight_decay: float
    clip: float
    seed: int
    keeping: CheckpointSettings
    validation: float = 0.0
    validate_every: int = 0


@dataclass(frozen=True)
class Step:
    """What one step was: `number` counts from 1; the timing's peak is the highest of all ranks so far.

    Without a `gradient_norm` the gradients overflowed in fp16, and all ranks left the parameters as they were.
    """

    number: int
    loss: float
    gradient_norm: float | None
    lr: float
    tokens_per_second: float
    timing: Timing
    validation_loss: float | None = None


@dataclass(frozen=True)
class Data:
    """The windows of a run: the last ones are held back for validation, the others are trained on in their order."""

    windows: Windows
    order: Order

    @staticmethod
    def of(windows: Windows, *, seed: int, validation: float) -> Data:
        trained = len(windows) - math.ceil(validation * len(windows))
        if trained < 1:
            raise UsageError(
                f"--validation {validation} of {len(windows)} windows leaves none to train on; give more data or less"
            )
        return Data(windows, Order(trained, seed))

    @property
    def held_back(self) -> range:
        return range(self.order.windows, len(self.windows))


class Trainer:
    """One run on one rank; all ranks go through the same calls."""

    def __init__(
        self,
        source: ModelSource,
        model: nn.Module,
        feed: Feed,
        plan: Plan,
        data: Data,
        settings: Settings,
        *,
        world: World,
        watchdog: Watchdog,
    ) -> None:
        self.source, self.feed, self.plan, self.data, self.settings = source, feed, plan, data, settings
        self.world, self.watchdog = world, watchdog
        self.memory = PeakMemory(world.device)
        self.model = _parallel(model, plan, world, settings.seed)
        if source.pretrained is not None:
            osdp.load_pretrained(self.model, source.pretrained)
        self.optimizer = make_optimizer(
            self.model, plan.optimizer, lr=settings.schedule.lr, weight_decay=settings.weight_decay
        )
        # without fp16 it passes everything on as it is
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=plan.precision == "fp16")
        self.now = "the start"
        self.checkpointing = Checkpointing(
            settings.keeping, self.model, self.optimizer, identity=self.identity, watch=self._watch, scaler=self.scaler
        )
        self._data_seconds = 0.0

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to be the same run: it decides which samples a step sees."""
        return {
            "seed": self.settings.seed,
            "global batch": self.plan.global_batch,
            "sequence length": self.feed.seq_len,
            "validation": self.settings.validation,
            "data": self.data.windows.digest,
        }

    def steps(self, done: int, wish: StopRequest) -> Iterator[Step]:
        """Trains from the step after `done` to the last, or until any rank is asked to stop."""
        for index in range(done, self.settings.steps):
            step, stop, writing = self._step(index, wish)
            yield step
            if stop:
                wish.signal = stop
            last = bool(stop) or step.number == self.settings.steps
            if last or self.checkpointing.due(step.number):
                self.checkpointing.save(step.number, last=last)
            elif not writing:
                self.checkpointing.settle()
            if stop:
                break

    def _step(self, index: int, wish: StopRequest) -> tuple[Step, int, bool]:
        """A step; the signal that any rank was sent; whether any rank still writes a checkpoint."""
        self._watch(f"step {index + 1}")
        began, computed, self._data_seconds = time.perf_counter(), time.thread_time(), 0.0
        saving = self.checkpointing.under_way
        # Of the step and not of the run, so that dropout after a restart is as it would have been.
        torch.manual_seed(_mixed(self.settings.seed, index, self.world.rank))
        lr = self.settings.schedule.at(index)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._gradients(index)
        self.scaler.unscale_(self.optimizer)
        norm = osdp.clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf).item()
        self.scaler.step(self.optimizer)  # all ranks skip it where one overflows
        self.scaler.update()
        self.optimizer.zero_grad()
        passed = time.perf_counter() - began
        waited = passed - (time.thread_time() - computed)
        times, peak = (passed, self._data_seconds, waited), self.memory.peak_bytes()
        numbers = self.world.all_numbers(loss, *times, peak, saving, self.checkpointing.under_way, wish.signal)
        losses, passes, data_seconds, waits, peaks, savings, writing, stops = zip(*numbers, strict=True)
        # a rank may begin a step before this one does: what it waited is part of the longest
        mean, seconds = sum(losses) / len(losses), max(time.perf_counter() - began, *passes)
        if not math.isfinite(mean) or not (math.isfinite(norm) or self._may_skip()):
            self.checkpointing.settle_after_failure()
            resumes = self.checkpointing.resumes()
            raise OsdpError(f"step {index + 1} has loss {mean} and gradient norm {norm}; lower --lr; {resumes}")
        on_cpu = self.world.device.type == "cpu"
        timing = Timing(seconds, max(data_seconds), max(waits) if on_cpu else None, int(max(peaks)), any(savings))
        tokens = self.plan.global_batch * self.feed.seq_len
        norm = norm if math.isfinite(norm) else None
        step = Step(index + 1, mean, norm, lr, tokens / seconds, timing, self._validated(index + 1))
        return step, int(max(stops)), any(writing)

    def _may_skip(self) -> bool:
        """Whether gradients that overflowed are no failure: with fp16, as long as a smaller scale may mend it."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= LEAST_SCALE

    def _gradients(self, index: int) -> float:
        """Forward and backward of all micro-batches; the mean loss of this rank."""
        micro_batches, total = range(self.plan.accumulation), 0.0
        for micro in osdp.accumulate(self.model, micro_batches):
            self._watch(self.now)
            loss = self._loss(
                self.data.order.of_rank(
                    index,
                    micro,
                    rank=self.world.rank,
                    ranks=self.world.size,
                    batch=self.plan.batch_size,
                    accumulation=self.plan.accumulation,
                )
            )
            self.scaler.scale(loss / len(micro_batches)).backward()
            total += loss.item()
        return total / len(micro_batches)

    def _loss(self, windows: list[int]) -> Tensor:
        began = time.perf_counter()
        batch = torch.from_numpy(self.data.windows.batch(windows, vocab=self.feed.vocab)).to(self.world.device)
        self._data_seconds += time.perf_counter() - began
        args, kwargs = self.feed.arguments(batch)
        return self.source.loss(self.model(*args, **kwargs))

    @torch.no_grad()
    def _validated(self, number: int) -> float | None:
        every, held_back = self.settings.validate_every, self.data.held_back
        if not held_back or not (number == self.settings.steps or (every and number % every == 0)):
            return None
        self._watch(f"validation after step {number}")
        each, total = self.plan.batch_size, 0.0
        batches = min(MOST_VALIDATION_BATCHES, math.ceil(len(held_back) / (each * self.world.size)))
        self.model.eval()
        for batch in range(batches):  # every rank as many: forward gathers parameters from all
            first = (batch * self.world.size + self.world.rank) * each
            total += self._loss([held_back[i % len(held_back)] for i in range(first, first + each)]).item()
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what backward would have done
        return sum(mean for (mean,) in self.world.all_numbers(total / batches)) / self.world.size

    def _watch(self, what: str) -> None:
        self.now = what
        self.watchdog.watch(what)


def _parallel(model: nn.Module, plan: Plan, world: World, seed: int) -> nn.Module:
    if not world.leads:
        warnings.filterwarnings("ignore", module=r"torch\.")  # rank 0 has the same ones
    if plan.precision == "pure-bf16":
        model = model.to(torch.bfloat16)
    osdp.parallelize(model, plan, device=world.device)
    return osdp.initialize(model, seed=seed, device=world.device)


def _mixed(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1
