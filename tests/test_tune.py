"""Claim: tuning runs what it plans, corrects the profile by it, and keeps the fastest plan that fits."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from small_models import source

from osdp.cluster import Cluster
from osdp.model.kernels import SCALAR_BYTES
from osdp.planfile import Plan
from osdp.report.tune_page import learnt
from osdp.training.world import World
from osdp.tuning.calibrate import Factors
from osdp.tuning.job import Job, tune_in
from osdp.tuning.run import Tuned

JOB = Job(
    name="gpt",
    cluster=replace(Cluster.parse("2xCPU"), memory_bytes=8 << 20),
    memory_bytes=None,
    precision="fp32",
    optimizer="adamw",
    reduce_dtype=None,
    batch=2,
    global_batch=None,
    pins={},
    modes=None,
    split=False,
    recompute="auto",
    candidates=1,
    steps=1,
    timeout_seconds=60,
    quiet=True,
)


def tuned_on_ranks() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"), dist.HashStore())
    return tune_in(world, JOB, source("gpt")).to_dict()


def test_what_ran_is_compared_and_the_fastest_is_kept() -> None:
    first, second = run_ranks(2, tuned_on_ranks)
    assert first == second
    tried = first["tried"]
    assert len({each["origin"] for each in tried}) == len(tried) >= 2
    assert first["best"] == max(range(len(tried)), key=lambda index: tried[index]["samples_per_second"])
    parameters = len(source("gpt").build_on_meta().state_dict())
    for each in tried:  # beside it are the loss, its gradient, and a byte for each parameter; see osdp.runtime.unused
        assert abs(each["peak_bytes"] + SCALAR_BYTES - each["predicted_peak_bytes"]) <= 16 + parameters
    plan, cluster = Plan.from_dict(first["plan"]), Cluster.from_dict(first["cluster"])
    assert plan.batch_size == 2 and cluster.stages
    assert first["factors"] != asdict(Factors())  # a catalogue's figures are never exact on this machine


def test_only_what_changed_is_said() -> None:
    tuned = Tuned(None, (), JOB.cluster, Factors(compute=1.3, communication=1.01), "")  # type: ignore[arg-type]
    assert learnt(tuned) == ["compute takes 1.30 times what the profile said"]
    assert learnt(replace(tuned, factors=Factors())) == ["the profile was right: nothing is corrected"]
