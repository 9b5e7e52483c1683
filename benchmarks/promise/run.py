"""Cases on processes that stay: one plans, and one set for each number of ranks trains case after case.

All are forked from a server that has torch and the models' modules loaded, so a case costs its own work and no start.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.promise.cases import KINDS, Case

if TYPE_CHECKING:
    from osdp.model.source import ModelSource
    from osdp.planfile import Plan
    from osdp.training.world import World

TIMEOUT_SECONDS, SEARCH_SECONDS = 240.0, 0.3
STEPS = 2  # under the allocator's account; of these the lowest counts: what is freed late is freed by chance
_LOADED = [
    "osdp.api",
    "osdp.model.capture",
    "osdp.profiling.trial",
    "osdp.runtime.apply",
    "osdp.training.loop",
    "torch._dynamo",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS if kind != "gpt"),
]


@dataclass(frozen=True)
class Found:
    """What a plan promised and what its ranks allocated at most: in a bare loop, and as `osdp train` trains."""

    limit_bytes: int
    predicted_bytes: int
    bare_bytes: int
    command_bytes: int | None


class Cases:
    """Runs case after case; its processes end with it."""

    def __init__(self) -> None:
        self._sets: dict[int, _Processes] = {}

    def __enter__(self) -> Cases:
        return self

    def __exit__(self, *_: object) -> None:
        for processes in self._sets.values():
            processes.end()

    def run(self, case: Case) -> Found:
        """Raises RuntimeError with the traceback where a process fails or takes too long."""
        limit, plan = self._answers(0, partial(_planned, case))[0]
        peaks = self._answers(case.ranks, partial(_on_rank, case, plan))
        bare, command = (max(column, default=0) for column in zip(*peaks, strict=True))
        return Found(limit, plan["predicted"]["peak_bytes"], bare, command or None)

    def _answers(self, ranks: int, function: Callable[[], Any]) -> list[Any]:
        """Of one process without a group for 0 ranks. What failed is ended, and started anew for the next case."""
        if ranks not in self._sets:
            self._sets[ranks] = _Processes(ranks)
        try:
            return self._sets[ranks].answers(function)
        except RuntimeError:
            self._sets.pop(ranks).end()
            raise


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


class _Processes:
    """So many ranks of one process group, or with 0 a process without one; each does what it is sent, in turn."""

    def __init__(self, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._started = []
        for rank in range(max(1, ranks)):
            here, there = _context().Pipe()
            where = (rank, ranks, f"file://{self._folder.name}/store") if ranks else None
            process = _context().Process(target=_serve, args=(there, where), daemon=True)
            process.start()
            there.close()
            self._started.append((process, here))

    def answers(self, function: Callable[[], Any]) -> list[Any]:
        payload, until = pickle.dumps(function), time.monotonic() + TIMEOUT_SECONDS
        answers = []
        try:
            for _, connection in self._started:
                connection.send_bytes(payload)
            for _, connection in self._started:
                if not wait([connection], max(0.0, until - time.monotonic())):
                    raise RuntimeError(f"no answer in {TIMEOUT_SECONDS:.0f} s")
                failure, answer = pickle.loads(connection.recv_bytes())
                if failure:
                    raise RuntimeError(failure)
                answers.append(answer)
        except (EOFError, BrokenPipeError):
            raise RuntimeError("a process died") from None
        return answers

    def end(self) -> None:
        for process, connection in self._started:
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


def _serve(connection: Connection, where: tuple[int, int, str] | None) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # or the first collection goes through, and copies, all that the server has loaded
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if where is not None:
        rank, size, store = where
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((None, function()))
        except BaseException:
            answer = pickle.dumps((traceback.format_exc(), None))
        gc.collect()
        connection.send_bytes(answer)


def source_of(case: Case) -> ModelSource:
    import torch

    from osdp.model.gpt import GPT, GPTConfig
    from osdp.model.source import ModelSource, load_model, output_loss

    if case.kind != "gpt":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps({"model_type": case.kind, **case.config}))
            return load_model(str(file), seq_len=None if case.kind == "vit" else case.seq_len)
    config, length = case.config, case.seq_len
    sizes = GPTConfig(
        config["vocab"], length, (config["layers"],), (config["width"],), head_width=8, tied=config["tied"]
    )

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.empty(batch, length, dtype=torch.long, device="meta")
        return (tokens, tokens.clone()), {}

    return ModelSource("gpt", partial(GPT, sizes), inputs, output_loss, length, length, None, "a random GPT")


def _planned(case: Case) -> tuple[int, dict[str, Any]]:
    """The limit, and the plan under it."""
    from osdp.cluster import Cluster
    from osdp.cost.tables import Rules
    from osdp.cost.training import Training
    from osdp.infeasible import smallest_timeline
    from osdp.model.capture import capture
    from osdp.planning import plan_graph

    training = Training.of(case.precision, case.optimizer)
    source, cluster = source_of(case), Cluster.parse(f"{case.world}xCPU")
    graph = capture(
        source.build_on_meta(),
        source.inputs,
        loss=source.loss,
        name=source.name,
        compute_dtype=training.precision.compute_dtype,
        held_dtype=training.precision.held_dtype,
        seq_len=source.seq_len,
        batch=case.batch,
    )

    def planned(limit: int | None) -> Plan:
        within = cluster if limit is None else cluster.with_limit(limit)
        sizes = {"batch": case.batch, "accumulation": case.accumulation}
        return plan_graph(graph, within, training, Rules(), search_seconds=SEARCH_SECONDS, **sizes)

    most = planned(None).predicted.peak_bytes
    accumulating = Training(training.precision, training.optimizer, training.reduce_dtype, case.accumulation)
    least = min(most, smallest_timeline(graph, cluster, accumulating, Rules(), case.batch).peak_bytes)
    limit = least + int(case.tightness * (most - least))
    return limit, planned(limit).to_dict()


def _on_rank(case: Case, plan: dict[str, Any]) -> tuple[int, int]:
    """The peaks of this rank: in a bare loop, and as `osdp train` trains; 0 where it cannot."""
    import torch
    import torch.distributed as dist

    from osdp.planfile import Plan
    from osdp.training.world import World

    rank, devices = dist.get_rank(), int(case.world.split("x")[1])
    world = World(rank, case.ranks, rank % devices, devices, torch.device("cpu"), dist.HashStore())
    made = Plan.from_dict(plan)
    bare = _bare(case, made, world)
    gc.collect()
    command = _by_command(case, made, world) if case.by_command else 0
    dist.barrier()
    return bare, command


def _bare(case: Case, plan: Plan, world: World) -> int:
    from osdp.profiling.trial import WARM_UP_STEPS, Tried

    tried = Tried(source_of(case), plan, world)
    for _ in range(WARM_UP_STEPS):
        tried.step()
    return min(tried.peak_bytes() for _ in range(STEPS))


def _by_command(case: Case, plan: Plan, world: World) -> int:
    """The steps of `osdp train`, with its data, clipping, norms and what it tells other ranks."""
    import numpy as np

    from osdp.profiling.trial import WARM_UP_STEPS, peak_above_start, storage_bytes
    from osdp.training.batches import feed_of
    from osdp.training.checkpointing import CheckpointSettings
    from osdp.training.data import Windows
    from osdp.training.failures import StopRequest, Watchdog
    from osdp.training.loop import Data, Settings, Trainer
    from osdp.training.optimizer import Schedule

    source = source_of(case)
    model = source.build_on_meta()
    feed = feed_of(source, model)
    tokens = np.random.default_rng(0).integers(0, feed.vocab or 61, 40_000, dtype=np.uint16)
    data = Data.of(Windows((tokens,), feed.seq_len + 1), seed=0, validation=0.0)
    settings = Settings(100, Schedule(1e-3, 10, 100), 0.1, 1.0, 0, CheckpointSettings())
    watchdog = Watchdog(TIMEOUT_SECONDS, sentence=str)
    trainer = Trainer(source, model, feed, plan, data, settings, world=world, watchdog=watchdog)
    steps = trainer.steps(0, StopRequest())
    for _ in range(WARM_UP_STEPS):
        next(steps)
    states = [
        value for state in trainer.optimizer.state.values() for value in state.values() if hasattr(value, "shape")
    ]
    held = storage_bytes((*trainer.model.parameters(), *trainer.model.buffers(), *states))
    return held + min(peak_above_start(lambda: next(steps)) for _ in range(STEPS))
