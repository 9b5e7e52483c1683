"""Claims: a plan file reads back equal; anything but a complete plan of this version is refused with the reason."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osdp.cluster import Cluster
from osdp.errors import UsageError
from osdp.planfile import MODES, PLAN_VERSION, Plan, PlanUnit


def test_a_saved_plan_reads_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reads_back(plan: Plan, unit: Callable[..., PlanUnit], mode: str) -> None:
    changed = replace(plan, units=(unit("only", mode=mode, splits=4, sharded_splits=2, reduce_once=True),))
    assert Plan.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


def test_a_plan_without_a_length_and_with_a_changed_cluster_reads_back(plan: Plan) -> None:
    cluster = Cluster.of("A100-40GB", devices_per_node=3, memory="7GiB", name="lab", overlap=False)
    changed = replace(plan, model=replace(plan.model, seq_len=None), cluster=cluster)
    again = Plan.from_dict(json.loads(json.dumps(changed.to_dict())))
    assert again == changed
    assert again.cluster.limit_bytes == cluster.limit_bytes


def test_the_file_is_plain_json_that_names_its_version(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["version"] == PLAN_VERSION
    assert document["cluster"]["word"] == "2x4xA100-40GB"
    assert [unit["name"] for unit in document["units"]] == [unit.name for unit in plan.units]


def _changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    return document


@pytest.mark.parametrize("version", [0, PLAN_VERSION + 1, "1", None])
def test_other_versions_are_refused(plan: Plan, version: object) -> None:
    with pytest.raises(UsageError, match=r"version .* reads version 1; plan again"):
        Plan.from_dict(_changed(plan.to_dict(), "version", version))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("batch_size", "3", r"plan\.batch_size is '3', which is not a int"),
        ("batch_size", 3.0, r"plan\.batch_size is 3\.0"),
        ("batch_size", True, r"plan\.batch_size is True"),
        ("batch_size", None, r"plan\.batch_size is None"),
        ("predicted", [], r"plan\.predicted must be a table"),
        ("predicted.step_seconds", "fast", r"plan\.predicted\.step_seconds is 'fast'"),
        ("predicted.memory_parts", {"parameters": 1.5}, r"memory_parts\.parameters is 1\.5"),
        ("certificate.gap", None, r"plan\.certificate\.gap is None"),
        ("units", {}, r"plan\.units is \{\}"),
        ("units.1.modules", "blocks.0", r"plan\.units\[1\]\.modules is 'blocks\.0'"),
        ("units.1.recompute", 1, r"plan\.units\[1\]\.recompute is 1"),
        ("units.1.mode", "shard", r"unknown mode 'shard'; the modes are replicate, keep, free"),
        ("units.1.colour", "red", r"plan\.units\[1\] has unknown field 'colour'"),
        ("cluster", "8xA100", r"the plan's cluster is missing"),
        ("cluster.nodes", 0, r"nodes is 0"),
        ("cluster.planet", "mars", r"planet"),
    ],
)
def test_a_wrong_value_is_refused_and_named(plan: Plan, path: str, value: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Plan.from_dict(_changed(plan.to_dict(), path, value))


@pytest.mark.parametrize("field", ["model", "cluster", "units", "certificate", "accumulation"])
def test_a_missing_field_is_refused_and_named(plan: Plan, field: str) -> None:
    document = plan.to_dict()
    del document[field]
    with pytest.raises(UsageError, match=field):
        Plan.from_dict(document)


@pytest.mark.parametrize("document", [None, [], "plan", 3, {}])
def test_what_is_no_plan_at_all_is_refused(document: object) -> None:
    with pytest.raises(UsageError, match="not a plan"):
        Plan.from_dict(document)


def test_a_truncated_file_is_refused_at_every_length(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"plan\.json is not a plan"):
            Plan.load(path)


def test_a_binary_file_a_folder_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("binary.json", "", "absent.json"):
        with pytest.raises(UsageError, match="plan"):
            Plan.load(tmp_path / name)


def test_saving_replaces_an_old_file_and_leaves_nothing_else(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    plan.save(path)
    assert Plan.load(path) == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_else(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(UsageError, match="No space left on device; choose another path"):
        plan.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_saving_into_a_folder_that_is_not_there_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another path"):
        plan.save(tmp_path / "absent" / "plan.json")
