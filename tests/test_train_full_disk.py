"""A disk that fills up while `osdp train` saves: one sentence, exit code 1, and the last checkpoint goes on.

The disk is a limit on the size of a process's files, which the system enforces while they are written.
"""

from __future__ import annotations

import json
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from training_runs import FSDP2_WARNS, running, two_ranks

from osdp.cli.main import main

SMALL = ("tiny_lm:build", "--global-batch", "4", "--no-split", "--no-recompute", "--json", "--quiet")
FULL_BYTES = 4000


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def resumes_at(folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> bool:
    assert main(["train", *SMALL, "--checkpoint", str(folder), "--resume", "--steps", str(step + 1)]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [event["step"] for event in events if event["event"] == "resume"] == [step]


@FSDP2_WARNS
def test_saves_that_are_waited_for_and_others_fail_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *SMALL, "--checkpoint", str(tmp_path), "--save-every", "3"]
    assert main([*command, "--steps", "2"]) == 0
    for way in ([], ["--async-save"]):
        capsys.readouterr()
        with full_disk():
            assert main([*command, *way, "--steps", "500", "--resume"]) == 1
        assert capsys.readouterr().err == (
            f"osdp: error: rank 0 cannot save step 3 to {tmp_path}: File too large; free space, or save to another "
            f"folder (step 2 stays as it was); --resume goes on from step 2 in {tmp_path}\n"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
        assert not still_watched()
    assert resumes_at(tmp_path, 2, capsys)


def still_watched() -> bool:
    """Whether a watchdog of a run that has ended would still end this process."""
    watchdogs = [thread for thread in threading.enumerate() if thread.name == "osdp-watchdog"]
    for thread in watchdogs:
        thread.join(timeout=10)
    return any(thread.is_alive() for thread in watchdogs)


@FSDP2_WARNS
def test_a_disk_that_fills_up_on_one_of_two_ranks_ends_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "100000", "--checkpoint", str(tmp_path), "--save-every", "3", "--async-save")
    ranks = two_ranks("-m", "osdp", "train", *SMALL, *options)
    with running(*ranks):
        ranks[0].wait_until((tmp_path / "step-00000003").exists)
        resource.prlimit(ranks[1].popen.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
        assert [rank.end() for rank in ranks] == [1, 1]
    errors = "".join([*ranks[0].errors, *ranks[1].errors])
    (sentence,) = [*ranks[0].sentences(), *ranks[1].sentences()]
    said = re.fullmatch(
        rf"osdp: error: rank 1 cannot save step (\d+) to {tmp_path}: File too large; free space, or save to another "
        rf"folder \(step (\d+) stays as it was\); --resume goes on from step (\d+) in {tmp_path}\n",
        sentence,
    )
    assert said and int(said[1]) == int(said[2]) + 3 and said[2] == said[3] and "Traceback" not in errors
    assert all(re.fullmatch(r"step-\d{8}", path.name) for path in tmp_path.iterdir())
    assert resumes_at(tmp_path, int(said[2]), capsys)
