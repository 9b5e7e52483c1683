"""Trains for long on two gloo ranks, and applies and frees many plans in one process: does anything grow?

    python -m benchmarks.bench_endurance                          # 20,000 steps, 300 plans
    python -m benchmarks.bench_endurance --steps 400 --plans 20   # a small version

Resident memory, threads, open files and a step's CPU time, which does not depend on what else the machine does, are
read in ten windows; the first is warm-up. Flat means that the last window's median is at most so much above the
second's: 2 MiB of memory, no thread, no file, and 20 % of the time. 0 leaves out the steps, or the plans.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Row, deliver, met, parser

if TYPE_CHECKING:
    from torch import nn

    from osdp.planfile import Plan

RANKS, WINDOWS = 2, 10
MORE = {"memory, MiB": 2.0, "threads": 0.0, "files": 0.0}
SLOWER = 1.2


@dataclass(frozen=True)
class Window:
    """Medians of one window."""

    memory_mib: float
    threads: float
    files: float
    seconds: float


def _now() -> tuple[float, int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threading.active_count(), len(os.listdir("/proc/self/fd"))


def _windows(times: int, act: Callable[[], None]) -> list[Window]:
    found = []
    for _ in range(WINDOWS):
        rows = []
        for _ in range(max(1, times // WINDOWS)):
            began = time.process_time()
            act()
            rows.append((*_now(), time.process_time() - began))
        found.append(Window(*(statistics.median(column) for column in zip(*rows, strict=True))))
    return found


def _model() -> nn.Module:
    import torch

    from osdp.model.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(64, 16, (1,), (16,), head_width=16))


def _plan() -> Plan:
    import torch

    import osdp

    example = torch.zeros(1, 16, dtype=torch.long)
    return osdp.plan(_model(), (example, example), f"{RANKS}xCPU", precision="fp32", batch=2)


def _trained(plan: dict[str, Any], steps: int) -> list[Window]:
    import torch

    import osdp

    model = osdp.parallelize(_model(), osdp.Plan.from_dict(plan))
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.arange(32).view(2, 16)

    def step() -> None:
        model(tokens, tokens).backward()
        osdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _windows(steps, step)


def _applied(plan: dict[str, Any], plans: int) -> list[Window]:
    import torch

    import osdp

    tokens = torch.arange(32).view(2, 16)

    def once() -> None:
        model = osdp.parallelize(_model(), osdp.Plan.from_dict(plan))
        model(tokens, tokens).backward()
        del model
        gc.collect()

    return _windows(plans, once)


def _on_rank(sender: Any, rank: int, store: str, work: Callable[[], list[Window]]) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    found = work()
    dist.barrier()
    dist.destroy_process_group()
    sender.send(found)


def _on_ranks(work: Callable[[], list[Window]]) -> list[list[Window]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(RANKS):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_on_rank, args=(sender, rank, f"file://{folder}/store", work))
            process.start()
            sender.close()
            started.append((process, receiver))
        found = [receiver.recv() for _, receiver in started]
        for process, _ in started:
            process.join()
    return found


def rows(what: str, times: int, ranks: list[list[Window]]) -> list[Row]:
    """Of the rank that grew most: the second window, the last, and whether that is flat."""
    found: list[Row] = []
    for name, field in (("memory, MiB", "memory_mib"), ("threads", "threads"), ("files", "files")):
        pairs = [(getattr(windows[1], field), getattr(windows[-1], field)) for windows in ranks]
        first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
        row: Row = {"what": what, "times": times, "figure": name, "first": first, "last": last}
        found.append({**row, "target: flat": met(last - first, MORE[name])})
    first, last = max((1e3 * w[1].seconds, 1e3 * w[-1].seconds) for w in ranks)
    row = {"what": what, "times": times, "figure": "each, ms of CPU", "first": first, "last": last}
    return [*found, {**row, "target: flat": met(last / first, SLOWER)}]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=20_000)
    options.add_argument("--plans", type=int, default=300)
    given = options.parse_args()
    plan = _plan().to_dict()
    found: list[Row] = []
    if given.steps:
        found += rows("steps", given.steps, _on_ranks(partial(_trained, plan, given.steps)))
    if given.plans:
        found += rows("plans applied and freed", given.plans, _on_ranks(partial(_applied, plan, given.plans)))
    deliver({"endurance": found}, as_json=given.json)


if __name__ == "__main__":
    main()
