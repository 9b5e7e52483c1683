"""Shared by all tests: few threads, and a hand-made plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from osdp.cluster import Cluster
from osdp.planfile import PLAN_VERSION, Baseline, Certificate, Plan, PlanModel, PlanUnit, Predicted
from osdp.recompute import Recompute

# Tests run beside each other and start ranks of their own: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Packages of other tests bring plugins for hypothesis that warn as they are imported, which ends a rank.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")
# A busy machine makes nothing wrong: an example may take as long as it takes.
settings.register_profile("osdp", deadline=None)
settings.load_profile("osdp")

GIB = 1024**3


def _unit(name: str, **changes: Any) -> PlanUnit:
    """A freed unit of 100 parameters outside blocks, but for the changes."""
    fields: dict[str, Any] = {
        **{"name": name, "modules": (name,), "block": None, "mode": "free", "splits": 1, "sharded_splits": 1},
        **{"recompute": Recompute.NONE, "reduce_once": False, "two_levels": False, "parameters": 100},
    }
    return PlanUnit(**{**fields, **changes})


@pytest.fixture
def unit() -> Callable[..., PlanUnit]:
    return _unit


@pytest.fixture
def plan() -> Plan:
    """A plan of four blocks, the last of which differs, on 2 nodes of 4 devices."""
    units = [_unit("embed", parameters=1000, modules=("embed", "head"), mode="keep")]
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        units.append(_unit(block, block=block, parameters=20, recompute=Recompute.FULL))
        units.append(_unit(f"{block}.mlp", block=block, splits=4, sharded_splits=3, recompute=Recompute.FULL))
    units.append(_unit("blocks.3", block="blocks.3", parameters=120, mode="replicate"))
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel("toy", 1480, 128),
        cluster=Cluster.parse("2x4xA100-40GB"),
        precision="bf16",
        reduce_dtype="fp32",
        optimizer="adamw",
        batch_size=3,
        accumulation=2,
        predicted=Predicted(
            step_seconds=1.5,
            mfu=0.4,
            samples_per_second=32.0,
            peak_bytes=30 * GIB,
            limit_bytes=40 * GIB,
            reserve_bytes=2 * GIB,
            peak_at="blocks.2.mlp in backward",
            memory_parts={"parameters": 10 * GIB, "saved activations": 20 * GIB, "temporaries": 0},
            time_parts={"compute": 1.2, "exposed communication": 0.3},
        ),
        certificate=Certificate("optimal", 32.0, 0.0, 32.0, 3, 5, 0.7, 12, 340),
        baselines=(
            Baseline("data parallel", Recompute.NONE, False, 0, 1, 0.0, 0.0, 90 * GIB),
            Baseline("fully sharded", Recompute.FULL, True, 2, 2, 20.0, 1.6, 25 * GIB),
        ),
        units=tuple(units),
    )


@pytest.fixture(scope="session")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file that `osdp plan` wrote, for tests of the commands that read one."""
    from osdp.cli.main import main

    path = tmp_path_factory.mktemp("plans") / "plan.json"
    options = ("--cluster", "4xRTX-TITAN", "--seq-len", "32", "--batch", "2", "--quiet")
    assert main(["plan", "gpt-tiny", *options, "-o", str(path)]) == 0
    return path
