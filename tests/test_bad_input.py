"""Claims: bad input of any kind is refused with one sentence and exit code 2, without a traceback and soon.

- Changed plan files, cluster files, configurations, data files, arguments and environments, from a seed: no traceback,
  nothing beyond the bound, no nonsense accepted, no good input refused, no wrong exit code; benchmarks/bench_fuzz.py
  runs thousands.
- Pipes, devices and files that are unreasonably large are not read.
- A plan that leaves out a part of its model is refused by `graph`, `verify` and `train` alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from odd_models import Adapters, Owning, Repeated, TiedThrice, UnusedBeside, UnusedGradients, odd_graph
from planned import plan_by_hand
from torch import nn

from benchmarks.fuzz import KINDS, fuzz
from osdp.cli.main import main
from osdp.cost.units import OPERATORS, WHOLE
from osdp.errors import UsageError
from osdp.files import MOST_BYTES, convert, read_file, read_json, write_text
from osdp.plan_check import Held, check_graph, misfit
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE
from osdp.training.world import started

CASES = {"plan files": 130, "cluster files": 60, "configurations": 12, "data files": 40, "arguments": 70}


@pytest.mark.parametrize("kind", KINDS)
def test_changed_input_is_refused_or_makes_sense(kind: str) -> None:
    report = fuzz(kind, CASES[kind], seed=7)
    assert report.cases == CASES[kind]
    assert not report.faults, "\n".join(report.examples)
    assert report.codes[2] > 0.5 * report.cases


# ---- files


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_pipe, "it is a pipe"),
        (_zeros, "it is a device"),
        (Path.mkdir, "it is a folder"),
        (_huge, "at most 67,108,864"),
    ],
)
def test_what_is_no_file_is_not_read(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    make(tmp_path / "odd")
    with pytest.raises(UsageError, match=rf"odd: .*{reason}.*; give another"):
        read_file(tmp_path / "odd", remedy="give another")


@pytest.mark.parametrize("text", [b"[NaN]", b"[1e999]", b"[" * 100_000, b"\xff", b"", b'{"a": 1', b"[1] 2"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(UsageError, match=r"file.json: it is not valid JSON \(.*\); give another"):
        read_json(tmp_path / "file.json", remedy="give another")


def test_a_failed_write_leaves_nothing_beside_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    with pytest.raises(UsageError, match=r"cannot write .*folder: .*; choose another path"):
        write_text("new", tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["file"]


class Inner(msgspec.Struct):
    size: Annotated[int, Meta(ge=1, le=8)]
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class Outer(msgspec.Struct):
    name: str
    inner: list[Inner]
    either: str | int | None = None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": 3}, "it.name is 3 but must be a text; fix it"),
        ({"inner": {}}, "it.inner is {} but must be a list; fix it"),
        ({"inner": [{"size": 0}]}, "it.inner[0].size is 0 but must be a whole number of at least 1; fix it"),
        ({"inner": [{"size": 2**70}]}, f"it.inner[0].size is {2**70} but must be a whole number of at most 8; fix it"),
        ({"inner": [{"size": 1, "share": 1}]}, "it.inner[0].share is 1 but must be a number below 1; fix it"),
        ({"inner": [{}]}, "it.inner[0] has no field 'size'; fix it"),
        ({"inner": [{"size": 1, "sizes": 2}]}, "it.inner[0] has an unknown field 'sizes'; did you mean 'size'; fix it"),
        ({"either": []}, "it.either is [] but must be a whole number or a text or null; fix it"),
    ],
)
def test_a_sentence_gives_the_field_the_value_the_limit_and_the_remedy(change: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"name": "a", "inner": [{"size": 1}]}
    assert convert(Outer, good, name="it", remedy="fix it") == Outer("a", [Inner(1)])
    with pytest.raises(UsageError) as caught:
        convert(Outer, {**good, **change}, name="it", remedy="fix it")
    assert str(caught.value) == sentence


# ---- the environment


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("RANK", "²", "from 0 to 0"),
        ("RANK", "1", "from 0 to 0"),
        ("RANK", "-1", "from 0 to 0"),
        ("WORLD_SIZE", "0", "from 1 to 1048576"),
        ("WORLD_SIZE", "9" * 5000, "from 1 to 1048576"),
        ("LOCAL_WORLD_SIZE", " 1", "from 1 to 1048576"),
        ("MASTER_PORT", "65536", "from 1 to 65535"),
    ],
)
def test_an_environment_that_torchrun_does_not_make_is_refused(
    name: str, value: str, limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    for each, text in {**alone, name: value}.items():
        monkeypatch.setenv(each, text)
    sentence = f"the environment says {name}=.* {limits}; start ranks with torchrun"
    with pytest.raises(UsageError, match=sentence), started(timeout_seconds=1):
        pass


# ---- plans and their model


def test_every_parameter_is_in_exactly_one_unit(plan: Plan) -> None:
    held = [Held(("embed.weight", "head.weight"), (10, 100))]
    for block in range(3):
        held += [Held((f"blocks.{block}.norm.weight",), (20,)), Held((f"blocks.{block}.mlp.weight",), (10, 10))]
    held += [Held(("blocks.3.weight",), (120,))]

    def reason(parameters: list[Held], *, can_split: bool = True) -> str | None:
        return misfit(plan, parameters, lambda _: can_split)

    assert reason(held) is None
    assert "'blocks.3', which the model lacks" in str(reason(held[:-1]))
    assert "extra.weight has 5 parameters and is in no unit" in str(reason([*held, Held(("extra.weight",), (5,))]))
    assert "blocks.3 has 121 parameters but was planned with 120" in str(
        reason([*held, Held(("blocks.3.bias",), (1,))])
    )
    assert "blocks.0.mlp is planned in 4 slices, and this operator cannot be split" in str(
        reason(held, can_split=False)
    )


@pytest.mark.parametrize("kind", [UnusedGradients, UnusedBeside, TiedThrice, Owning, Repeated, Adapters])
@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
def test_a_plan_of_an_odd_model_holds_what_is_called(kind: type[nn.Module], granularity: str) -> None:
    """Tied, unused, parent-owned and frozen parameters, and modules that are called several times."""
    graph = odd_graph(kind)
    plan = plan_by_hand(graph, "2x2", modes=(FREE, KEEP, REPLICATE), granularity=granularity)
    check_graph(plan, graph)
    assert Plan.from_dict(plan.to_dict()) == plan
    called = {name for stage in graph.stages for each in stage.operators for name in graph.operators[each].parameters}
    assert not called & set(plan.model.uncalled)


@pytest.mark.parametrize("command", ["graph", "verify", "train"])
@pytest.mark.parametrize("left_out", ["blocks.1", ""])
def test_a_plan_that_leaves_out_a_part_of_its_model_is_refused(
    command: str, left_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "gpt-tiny", "--cluster", "CPU", "--batch", "2", "--precision", "fp32", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    document["units"] = [unit for unit in document["units"] if not unit["name"].startswith(left_out)]
    path.write_text(json.dumps(document))
    capsys.readouterr()
    argv = ["train", "gpt-tiny", "--plan", str(path)] if command == "train" else [command, str(path)]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "units" in err and err.splitlines()[-1].endswith("plan again")


@pytest.mark.parametrize("command", ["graph", "verify", "train"])
def test_a_plan_that_calls_uncalled_what_is_called_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "gpt-tiny", "--cluster", "CPU", "--batch", "2", "--precision", "fp32", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    left_out = next(unit for unit in document["units"] if unit["name"] == "positions")
    document["units"].remove(left_out)
    document["model"]["uncalled"] = {"positions.weight": left_out["parameters"]}
    path.write_text(json.dumps(document))
    capsys.readouterr()
    argv = ["train", "gpt-tiny", "--plan", str(path)] if command == "train" else [command, str(path)]
    assert main(argv) == 2
    assert "the plan says that no call reaches positions.weight, but one does" in capsys.readouterr().err


def test_a_unit_that_stands_twice_is_refused_where_a_plan_is_applied(plan: Plan) -> None:
    twice = replace(plan, units=(*plan.units, plan.units[-1]))
    assert "module 'blocks.3' is in two units" in str(misfit(twice, [], lambda _: True))
