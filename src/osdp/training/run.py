"""A whole run on one rank: plan, build, train, and end well or with a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from osdp.cluster import Cluster
from osdp.errors import OsdpError, UsageError
from osdp.model.source import ModelSource
from osdp.planfile import Plan
from osdp.runtime import here
from osdp.training.batches import Feed, feed_of
from osdp.training.curves import CurveTargets
from osdp.training.data import Windows, open_tokens
from osdp.training.drift import Pace
from osdp.training.failures import StopRequest, Watchdog, explained
from osdp.training.logging import step_logger
from osdp.training.loop import Data, Settings, Trainer
from osdp.training.tracing import profiled, write_prediction
from osdp.training.world import World, started


@dataclass(frozen=True)
class Files:
    """Where tokens come from."""

    paths: tuple[Path, ...]
    tokenizer: Path | None
    token_dtype: str


@dataclass(frozen=True)
class LogSettings:
    """What is said while training; see `osdp.training.logging`."""

    as_json: bool
    quiet: bool
    every: int
    targets: CurveTargets
    trace: Path | None = None


PlanOf = Callable[[World, nn.Module], Plan]


def train(
    source: ModelSource,
    files: Files,
    settings: Settings,
    log_settings: LogSettings,
    *,
    plan_of: PlanOf,
    timeout_seconds: float,
    wish: StopRequest,
) -> int:
    """Trains on all ranks; gives the exit code. `plan_of` is called on all ranks and gives one plan."""
    with started(timeout_seconds=timeout_seconds) as world:
        run = _Run(source, files, settings, log_settings, plan_of, timeout_seconds, wish)
        try:
            return run.on(world)
        except BaseException as error:
            raise run.ended_by(error, world) from None


class _Run:
    def __init__(
        self,
        source: ModelSource,
        files: Files,
        settings: Settings,
        log_settings: LogSettings,
        plan_of: PlanOf,
        timeout_seconds: float,
        wish: StopRequest,
    ) -> None:
        self.source, self.files, self.settings, self.log_settings = source, files, settings, log_settings
        self.plan_of, self.timeout_seconds, self.wish = plan_of, timeout_seconds, wish
        self.plan: Plan | None = None
        self.trainer: Trainer | None = None

    def on(self, world: World) -> int:
        model = self.source.build_on_meta()
        feed = feed_of(self.source, model)
        data = self._data(feed)
        self.settings.keeping.check()
        settings, log_settings = self.settings, self.log_settings
        with ExitStack() as stack:
            said = step_logger(
                leads=world.leads,
                as_json=log_settings.as_json,
                quiet=log_settings.quiet,
                every=log_settings.every,
                steps=settings.steps,
                targets=log_settings.targets,
            )
            plan = self.plan = self.plan_of(world, model)
            stack.enter_context(settings.keeping.alone(world))
            say = stack.enter_context(said)
            watchdog = stack.enter_context(
                Watchdog(self.timeout_seconds, sentence=lambda what: self._hung(what, world))
            )
            trainer = Trainer(self.source, model, feed, plan, data, settings, world=world, watchdog=watchdog)
            self.trainer = trainer
            wish = stack.enter_context(self.wish.heard())
            done = trainer.checkpointing.resumed()
            say.start(plan, done, settings.keeping.folder)
            if self.source.pretrained is not None and not done and world.leads and not log_settings.quiet:
                print(f"osdp: begins with the stored weights of {self.source.name}", file=sys.stderr, flush=True)
            steps, pace = [], Pace(plan)
            trained = trainer.steps(done, wish)
            tracing = log_settings.trace if world.leads else None
            if tracing is not None:
                trained = profiled(trained, tracing, steps=settings.steps - done, device=world.device)
            for step in trained:
                say.step(step, plan)
                say.warn(pace.parted(step.timing))
                steps.append(step)
            if not wish.signal:
                say.end(steps, plan)
            if tracing is not None:
                write_prediction(plan, self.source, tracing)
        if wish.signal and world.leads:
            print(
                f"osdp: interrupted after step {steps[-1].number if steps else done};"
                f" {trainer.checkpointing.resumes()}",
                file=sys.stderr,
                flush=True,
            )
        return 128 + wish.signal if wish.signal else 0

    def _data(self, feed: Feed) -> Data:
        files, settings = self.files, self.settings
        tokens = tuple(open_tokens(p, tokenizer=files.tokenizer, dtype=files.token_dtype) for p in files.paths)
        windows = Windows(tokens, feed.seq_len + 1)
        windows.check(feed.vocab)
        return Data.of(windows, seed=settings.seed, validation=settings.validation)

    def _hung(self, what: str, world: World) -> str:
        resumes = self.trainer.checkpointing.resumes() if self.trainer else ""
        return (
            f"rank {world.rank} waited {self.timeout_seconds:g} s in {what}: another rank hangs or is gone, or "
            f"--timeout is too short; {resumes}"
        )

    def ended_by(self, error: BaseException, world: World) -> BaseException:
        """What to raise on this rank: of all that fail with one cause, the first speaks."""
        during = self.trainer.now if self.trainer else "the start"
        if self.trainer:
            self.trainer.checkpointing.settle_after_failure()
        resumes = self.trainer.checkpointing.resumes() if self.trainer else "nothing is trained yet"
        known = error if isinstance(error, (OsdpError, OSError)) else None
        known = known or explained(error, during=during, plan=self.plan, resumes=resumes)
        if type(error) is OsdpError and resumes not in str(error):  # of a save, which cannot know it
            known = OsdpError(f"{error}; {resumes}")
        if known is None:
            return error
        return known if world.speaks_first() else SystemExit(2 if isinstance(known, UsageError) else 1)


def this_cluster(world: World, *, memory_bytes: int | None) -> Cluster:
    """The ranks that run; see `osdp.runtime.here`."""
    return here.this_cluster(memory_bytes=memory_bytes, device=world.device, ranks_per_node=world.local_size)
