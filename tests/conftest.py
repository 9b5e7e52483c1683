"""Shared by all tests: few threads, and a hand-made plan."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from shared import FOLDER

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

# Test processes share work by file (`--dist loadgroup`), so that what a file captures, plans or trains once is not made
# anew in each of them. Files that take long begin first, so that none is left when the others are done; those whose
# tests share little are cut in pieces.
LONG_FIRST = {
    "test_train": 1,
    "test_training_is_exact": 3,
    "test_timeline_equals_fsdp2": 3,
    "test_runtime": 3,
    "test_search_equals_brute_force": 4,
    "test_profile": 1,
    "test_many_models": 2,
    "test_rivals": 1,
    "test_tables_equal_timeline": 1,
    "test_compiled": 1,
    "test_runtime_ranks": 2,
    "test_export": 1,
    "test_step_graph": 1,
    "test_weights": 1,
    "test_no_network": 1,
    "test_checkpoint_bad_days": 1,
    "test_accumulation_left_early": 1,
    "test_measured": 1,
    "test_cluster_on_one_machine": 1,
}


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # test processes inherit it
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="osdp-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.stem, []).append(item)
    order = [name for name in LONG_FIRST if name in files] + [name for name in files if name not in LONG_FIRST]
    for name in order:
        pieces = LONG_FIRST.get(name, 1)
        for index, item in enumerate(files[name]):
            item.add_marker(pytest.mark.xdist_group(f"{name}-{index * pieces // len(files[name])}"))
    items[:] = [item for name in order for item in files[name]]


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
