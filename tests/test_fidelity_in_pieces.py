"""The fidelity benchmark can be ended at any time and goes on behind what it had: nothing is run twice or lost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.__main__ import FIRST_WORLDS, WORLDS, build_parser, measured, work_of
from benchmarks.fidelity.models import NAMES
from benchmarks.fidelity.saved import Done, Work, append, read, write


def arguments(*given: str) -> Namespace:
    return build_parser().parse_args(list(given))


def done(work: Work, **more: Any) -> Done:
    case = {"world": work.world, "model": work.model, "way": work.ways[0], "step_seconds": 0.1 + 0.2, **more}
    return Done(work, "2026-11-18", "2.13.0", 95.0, (case,))


def test_every_world_has_the_most_telling_models_first() -> None:
    work = work_of(arguments())
    assert [each.world for each in work[: len(WORLDS)]] == list(FIRST_WORLDS)
    assert {each.model for each in work[: len(WORLDS)]} == {"gpt-deep"}
    assert {(each.world, each.model) for each in work} == {(world, model) for world in WORLDS for model in NAMES}
    assert len(set(work)) == len(work)


def test_a_models_plans_do_not_depend_on_which_others_are_run() -> None:
    alone = work_of(arguments("--models", "t5,vit", "--worlds", "3,4"))
    assert set(alone) < set(work_of(arguments()))


def test_what_was_saved_is_read_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cases.jsonl"
    assert read(file) == []
    every = [done(each) for each in work_of(arguments("--models", "gpt-deep"))]
    for each in every:
        append(file, each)
    assert read(file) == every
    file.write_text(file.read_text()[:-10])
    assert read(file) == every[:-1]
    append(file, every[-1])
    assert read(file) == every


def test_nothing_that_was_saved_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    args = arguments("--models", "gpt-deep", "--save", str(file))
    every = [done(each) for each in work_of(args)]
    write(file, every)
    assert measured(work_of(args), args) == (every, False)


def test_nothing_begins_once_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cases.jsonl"
    args = arguments("--models", "gpt-deep,t5", "--save", str(file), "--for-minutes", "0")
    work = work_of(args)
    had = [done(work[0]), done(work[3])]
    write(file, had)
    assert measured(work, args) == (had, False)
    assert f"time is up; {len(work) - 2} left" in capsys.readouterr().err


def test_another_rate_between_hosts_is_other_work(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    one, other = (arguments("--models", "vit", "--worlds", "2", "--across", rate) for rate in ("1gbit", "500mbit"))
    write(file, [done(each) for each in work_of(one)])
    other.save, other.for_minutes = file, 0.0
    assert measured(work_of(other), other) == ([], False)
