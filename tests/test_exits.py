"""Claim: the threads that carry collectives are there only while a model needs them, and no process ends in an abort.

- They start with the first collective, end with the last model, and start again with the next one.
- A process whose threads still have work when its script ends finishes that work, and exits with 0.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from odd_models import Model, built, data, odd_graph
from planned import plan_by_hand
from ranks import run_ranks
from trained import COURIER

import osdp
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE


def couriers(expected: int) -> int:
    """How many threads there are, once they are as many as expected, or after some seconds."""
    until = time.monotonic() + 5
    while (found := sum(thread.name == COURIER for thread in threading.enumerate())) != expected:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found


def threads_of_two_models(plan: Plan) -> list[int]:
    found = []
    for _ in range(2):
        first, second = (osdp.parallelize(built(Model), plan) for _ in range(2))
        found.append(couriers(0))
        first(*data(2, seed=0)).backward()
        found.append(couriers(2))
        del first
        gc.collect()
        second(*data(2, seed=0)).backward()
        found.append(couriers(2))
        del second
        gc.collect()
        found.append(couriers(0))
    return found


def test_threads_are_there_while_a_model_uses_them() -> None:
    plan = plan_by_hand(odd_graph(Model), "2", modes=(FREE, KEEP, REPLICATE))
    assert run_ranks(2, threads_of_two_models, plan) == [[0, 2, 2, 0] * 2] * 2


# Both threads are held up until the script's last line; then they have 5,000 collectives to carry.
SCRIPT = """
import sys, threading
import torch.distributed as dist
from osdp.engine import ASYNC_GLOO
from osdp.runtime.meshes import meshes_of

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
comm_threads, gate, done = meshes_of("cpu", 1, 1, engine=ASYNC_GLOO).comm_threads, threading.Event(), []
for _ in range(2):
    comm_threads.send(lambda groups: gate.wait())
for _ in range(4999):
    comm_threads.send(lambda groups: None)
comm_threads.send(lambda groups: print("carried", flush=True))
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
gate.set()
"""


@pytest.mark.parametrize("end", ["destroyed", "not destroyed"])
def test_a_process_ends_cleanly_while_its_threads_are_at_work(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), end]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "carried\n", "")
