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
from osdp.cost.units import SLICES
from osdp.errors import UsageError
from osdp.planfile import MOST_SPLITS, PLAN_VERSION, Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.sharding import MODES


def test_a_saved_plan_reads_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reads_back(plan: Plan, unit: Callable[..., PlanUnit], mode: str) -> None:
    only = unit("only", mode=mode, splits=4, sharded_splits=2, reduce_once=True)
    changed = replace(plan, model=replace(plan.model, parameters=only.parameters), units=(only,))
    assert Plan.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


def test_a_plan_without_a_length_and_with_a_changed_cluster_reads_back(plan: Plan) -> None:
    cluster = Cluster.of("A100-40GB", devices_per_node=3, memory="7GiB", name="lab", overlap=False)
    model = replace(plan.model, seq_len=None, name="other")
    changed = replace(plan, model=model, cluster=cluster, predicted=replace(plan.predicted, step_seconds=18 / 32))
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


@pytest.mark.parametrize("version", [0, 1, PLAN_VERSION + 1, str(PLAN_VERSION), float(PLAN_VERSION), True, None])
def test_other_versions_are_refused(plan: Plan, version: object) -> None:
    with pytest.raises(UsageError, match=rf"version .* reads version {PLAN_VERSION}; plan again with osdp plan"):
        Plan.from_dict(_changed(plan.to_dict(), "version", version))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("batch_size", "3", r"plan\.batch_size is '3' but must be a whole number; plan again"),
        ("batch_size", 3.0, r"plan\.batch_size is 3\.0"),
        ("batch_size", True, r"plan\.batch_size is True"),
        ("batch_size", None, r"plan\.batch_size is None"),
        ("batch_size", 0, r"plan\.batch_size is 0 but must be a whole number of at least 1"),
        ("batch_size", 1 << 70, r"plan\.batch_size is \d+ but must be a whole number of at most 4294967296"),
        ("accumulation", -1, r"plan\.accumulation is -1 but must be a whole number of at least 1"),
        ("predicted", [], r"plan\.predicted is \[\] but must be a table"),
        ("predicted.step_seconds", float("nan"), r"plan\.predicted\.step_seconds is nan but must be a number"),
        (
            "predicted.step_seconds",
            float("inf"),
            r"plan\.predicted\.step_seconds is inf but must be a number of at most",
        ),
        ("model.parameters", 1 << 64, r"plan\.model\.parameters is \d+ but must be a whole number of at most"),
        ("predicted.step_seconds", "fast", r"plan\.predicted\.step_seconds is 'fast'"),
        (
            "predicted.memory_parts",
            {"parameters": 1.5},
            r"memory_parts is \{'parameters': 1\.5\} but must be a whole number",
        ),
        ("certificate.gap", None, r"plan\.certificate\.gap is None"),
        ("units", {}, r"plan\.units is \{\} but must be a list"),
        ("units", [], r"plan\.units is \[\] but must be a list with a length of at least 1"),
        ("units.1.modules", [], r"plan\.units\[1\]\.modules is \[\] but must be a list with a length of at least 1"),
        ("units.1.splits", 0, r"plan\.units\[1\]\.splits is 0 but must be a whole number of at least 1"),
        ("units.1.splits", 17, r"plan\.units\[1\]\.splits is 17 but must be a whole number of at most 16"),
        ("units.1.modules", "blocks.0", r"plan\.units\[1\]\.modules is 'blocks\.0'"),
        ("units.1.recompute", 1, r"plan\.units\[1\]\.recompute is 1"),
        ("units.1.recompute", "some", r"plan\.units\[1\]\.recompute is 'some' but must be one of the known values"),
        ("units.1.mode", "shard", r"unit 'blocks.0' has the unknown mode 'shard'; the modes are replicate, keep, free"),
        ("units.1.colour", "red", r"plan\.units\[1\] has an unknown field 'colour'"),
        ("cluster", "8xA100", r"the plan's cluster is missing"),
        ("cluster.nodes", 0, r"in the plan's cluster, cluster\.nodes is 0"),
        ("cluster.planet", "mars", r"planet"),
    ],
)
def test_a_wrong_value_is_refused_and_named(plan: Plan, path: str, value: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Plan.from_dict(_changed(plan.to_dict(), path, value))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a unit twice": ({"twice": 1}, "module 'blocks.0' is in two units"),
    "a unit left out": ({"without": 1}, "the plan's units hold 1,460 parameters, but its model has 1,480"),
    "more sharded slices than slices": ({"sharded_splits": 2}, "has 2 sharded slices but only 1 slices"),
    "no sharded slice": ({"sharded_splits": 0}, "has mode free but no sharded slice"),
    "a unit outside its block": ({"block": "blocks.1"}, "unit 'blocks.0' is not in its block, 'blocks.1'"),
    "recompute without a block": ({"block": None}, "unit 'blocks.0' is recomputed but in no block"),
    "a block recomputed in part": ({"recompute": "none"}, "is recomputed in some of its units but not in all alike"),
    "selective in parts": ({"recompute": "selective"}, "is recomputed in some of its units but not in all alike"),
    "another name": ({"name": "blocks.9"}, "unit 'blocks.9' is not named after its first module, 'blocks.0'"),
    "a module of another unit": ({"modules": ["blocks.0", "embed"]}, "module 'embed' is in two units"),
    "two levels": ({"two_levels": True}, "is exchanged on two levels, which free on 2x4xA100-40GB is not"),
    "two granularities": ({"granularity": "parts"}, "block 'blocks.0' is gathered in two granularities"),
    "deep though whole": ({"prefetch": 2}, "prefetches two units, which only blocks that are gathered by operators do"),
    "deep slices": (
        {"prefetch": 2, "granularity": "operators", "splits": 2, "sharded_splits": 2},
        "has 2 slices and prefetches two units, which do not go together",
    ),
    "all-reduced once": ({"all_reduce_once": True}, "is all-reduced across nodes once a step, which free is not"),
    "reduced twice once": (
        {"all_reduce_once": True, "reduce_once": True, "mode": "keep_in_node"},
        "is reduced once a step, so it cannot be reduced in the node more often",
    ),
    "gathered once": ({"gather_once": True}, "is gathered once a step, which free is not: only whole units that are"),
    "slices gathered once": (
        {"gather_once": True, "mode": "keep", "splits": 2, "sharded_splits": 2},
        "is gathered once a step, which a unit in slices is not",
    ),
}


def test_selective_recompute_is_of_whole_blocks_only(plan: Plan) -> None:
    document = _changed(plan.to_dict(), "units.7.recompute", "selective")
    assert Plan.from_dict(document).units[7].recompute is Recompute.SELECTIVE
    with pytest.raises(UsageError, match=r"'blocks\.3' is a part or in slices, and only whole blocks are recomputed"):
        Plan.from_dict(_changed(document, "units.7.splits", 2))


def test_a_block_has_one_depth_of_prefetch(plan: Plan) -> None:
    document = plan.to_dict()
    inside = [place for place, unit in enumerate(plan.units) if unit.block == "blocks.0"]
    assert len(inside) > 1
    for place in inside:
        for field, value in (("granularity", "operators"), ("prefetch", 2), ("splits", 1), ("sharded_splits", 1)):
            document = _changed(document, f"units.{place}.{field}", value)
    assert [unit.prefetch for unit in Plan.from_dict(document).units if unit.block == "blocks.0"] == [2] * len(inside)
    with pytest.raises(UsageError, match=r"block 'blocks\.0' has two depths of prefetch"):
        Plan.from_dict(_changed(document, f"units.{inside[0]}.prefetch", 1))


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_makes_no_sense_as_a_whole_is_refused(plan: Plan, change: str) -> None:
    changes, reason = CHANGES[change]
    document = plan.to_dict()
    units = list(document["units"])
    units += [units[place] for place in [changes.get("twice")] if place]
    units = [unit for place, unit in enumerate(units) if place != changes.get("without")]
    for key in changes.keys() & units[1].keys():
        units[1] = {**units[1], key: changes[key]}
    with pytest.raises(UsageError, match=reason):
        Plan.from_dict({**document, "units": units})


def test_a_mode_that_the_cluster_does_not_have_is_refused(plan: Plan) -> None:
    changed = _changed(plan.to_dict(), "units.1.mode", "free_in_node")
    assert Plan.from_dict(changed).units[1].mode == "free_in_node"
    for word, modes, samples in (("8xA100-40GB", "replicate, keep, free", 48), ("A100-40GB", "replicate", 6)):
        predicted = {**changed["predicted"], "step_seconds": samples / 32}
        with pytest.raises(UsageError, match=f"but {word} has only {modes}; plan again"):
            Plan.from_dict({**changed, "cluster": Cluster.parse(word).to_dict(), "predicted": predicted})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("step_seconds", 1e-320, r"predicts 32 samples/s and steps of .* s, but a step has 48 samples"),
        ("samples_per_second", 33.0, r"predicts 33 samples/s and steps of 1\.5 s, but a step has 48 samples"),
        ("limit_bytes", 1, r"a peak of 32,212,254,720 bytes, but its limit is 1"),
    ],
)
def test_a_prediction_that_contradicts_itself_is_refused(plan: Plan, field: str, value: float, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Plan.from_dict(_changed(plan.to_dict(), f"predicted.{field}", value))


@pytest.mark.parametrize("word", ["precision", "reduce_dtype", "optimizer"])
def test_an_unknown_word_is_refused(plan: Plan, word: str) -> None:
    with pytest.raises(UsageError, match=f"the plan's {word} is 'best', but the known ones are .*; plan again"):
        Plan.from_dict({**plan.to_dict(), word: "best"})


def test_every_number_of_splits_that_is_searched_can_be_saved() -> None:
    assert max(SLICES) <= MOST_SPLITS


@pytest.mark.parametrize("field", ["model", "cluster", "units", "certificate", "accumulation"])
def test_a_missing_field_is_refused_and_named(plan: Plan, field: str) -> None:
    document = plan.to_dict()
    del document[field]
    with pytest.raises(UsageError, match=field):
        Plan.from_dict(document)


@pytest.mark.parametrize("field", ["offload", "reduced_with", "gather_once", "prefetch"])
def test_a_field_that_has_a_default_must_be_there_too(plan: Plan, field: str) -> None:
    document = plan.to_dict()
    del document["units"][2][field]
    with pytest.raises(UsageError, match=rf"plan\.units\[2\] has no field '{field}'; plan again"):
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
        with pytest.raises(UsageError, match=r"plan\.json: it is not valid JSON"):
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
