"""A checkpoint is whole or not there.

- A run that is killed at any moment of a save leaves the last checkpoint whole, and the next save clears up.
- Damaged checkpoints and full disks are the same error on all ranks, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import ON_2, ON_3, adamw, built, everything, loaded_small, resume, same, save_small, small, train
from ranks import RankFailed, run_ranks
from ranks import _context as processes

from osdp.errors import OsdpError
from osdp.planfile import Plan
from osdp.runtime.checkpoint import load_checkpoint, save_checkpoint

# Killed


def killed_at(event: int, folder: Path, step: int) -> None:
    """Checkpointing, and dies before the given file operation on the folder, or ends well if there are not so many."""
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        inside = any(str(folder) in str(arg) for arg in args[:2] if isinstance(arg, (str, Path)))
        if inside and name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # it cannot be taken back, but the process ends
    save_small(folder, step, keep=1)


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])  # a new one; one that replaces itself
def test_killed_at_any_file_operation_the_last_checkpoint_is_whole(step: int, tmp_path: Path) -> None:
    for event in range(1, 60):
        folder = tmp_path / str(event)
        save_small(folder, 1)
        process = processes().Process(target=killed_at, args=(event, folder, step))
        process.start()
        process.join()
        assert loaded_small(folder) in (1, step)
        for name in re.findall(r"\bstep-\d{8}$", "\n".join(os.listdir(folder)), re.MULTILINE):
            assert loaded_small(folder, int(name[5:])) == int(name[5:])
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        save_small(folder, 3, keep=1)
        assert os.listdir(folder) == ["step-00000003"] and loaded_small(folder) == 3
    assert 10 < event < 59 and os.listdir(folder) == [f"step-{step:08d}"] and loaded_small(folder) == step


def killed_after(seconds: float, victim: int, folder: Path, plan: Plan) -> None:
    model = built(plan)
    optimizer = adamw(model)
    load_checkpoint(folder, model, optimizer)
    if dist.get_rank() == victim:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for step in range(2, 500):
        save_checkpoint(folder, model, optimizer, step=step)


def test_killed_at_a_random_moment_of_a_save_on_ranks_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    chance = random.Random(0)
    model = built(None)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    for turn in range(4):
        folder = tmp_path / str(turn)
        save_checkpoint(folder, model, optimizer, step=1)
        with pytest.raises(RankFailed, match=r"exit code -9|OsdpError: another rank ended"):
            run_ranks(2, killed_after, chance.uniform(0.05, 0.6), turn % 2, folder, ON_2)
        into = built(None, seed=4)
        found = load_checkpoint(folder, into, own := adamw(into))
        assert found is not None and same(everything(into, own), before)
        save_checkpoint(folder, model, optimizer, step=1000)
        left = sorted(os.listdir(folder))
        assert left[-1] == "step-00001000" and all(re.fullmatch(r"step-\d{8}", name) for name in left)


# Damaged


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut data": ("__0_0.distcp", cut, r"__0_0\.distcp is damaged: [\d,]+ bytes instead of [\d,]+"),
    "changed data": ("__0_0.distcp", flip, r"__0_0\.distcp is damaged: its checksum is \w{8} instead of \w{8}"),
    "missing data": ("__0_0.distcp", Path.unlink, r"cannot read \S+__0_0\.distcp: No such file"),
    "cut metadata": (".metadata", cut, r"\.metadata is damaged: [\d,]+ bytes"),
    "changed metadata": (".metadata", flip, r"\.metadata is damaged: its checksum"),
    "missing metadata": (".metadata", Path.unlink, r"cannot read \S+\.metadata: No such file"),
    "cut JSON": ("checkpoint.json", lambda file: os.truncate(file, 100), r"checkpoint\.json is damaged: it is no JSON"),
    "empty JSON": ("checkpoint.json", lambda file: os.truncate(file, 0), r"checkpoint\.json is damaged: it is no JSON"),
    "list JSON": ("checkpoint.json", lambda file: file.write_text("[]"), r"checkpoint\.json is damaged: it is no JSON"),  # type: ignore[dict-item]
    "missing JSON": ("checkpoint.json", Path.unlink, r"cannot read \S+checkpoint\.json: No such file"),
    "changed JSON": (
        "checkpoint.json",
        lambda file: file.write_text(file.read_text().replace('"lr": 0.1', '"lr": 0.2')),  # type: ignore[dict-item]
        r"checkpoint\.json is damaged: its checksum is another",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(damage: str, tmp_path: Path) -> None:
    save_small(tmp_path, 100)
    save_small(tmp_path, 120)
    name, harm, message = DAMAGES[damage]
    harm(tmp_path / "step-00000120" / name)
    model, optimizer = small(7)
    before = everything(model, optimizer)
    with pytest.raises(OsdpError, match=message) as refused:
        load_checkpoint(tmp_path, model, optimizer)
    assert str(refused.value).endswith(f"remove {tmp_path / 'step-00000120'}, the one before is step 100")
    assert same(everything(model, optimizer), before)
    save_small(tmp_path, 130)  # it does not stop the training that goes on
    shutil.rmtree(tmp_path / "step-00000130")
    shutil.rmtree(tmp_path / "step-00000120")
    if damage == "cut data":
        save_small(tmp_path, 120, keep=1)
        harm(tmp_path / "step-00000120" / name)
        with pytest.raises(OsdpError, match=r"step-00000120, there is none before it$"):
            loaded_small(tmp_path)
    else:
        assert not (tmp_path / "step-00000100").exists() or loaded_small(tmp_path) == 100


def refusal(folder: Path, plan: Plan) -> tuple[str, bool]:
    model = built(plan)
    optimizer = adamw(model)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(OsdpError) as refused:
        load_checkpoint(folder, model, optimizer)
    now = [parameter.to_local() for parameter in model.parameters()]
    return str(refused.value), all(map(torch.equal, before, now)) and not optimizer.state


def test_all_ranks_refuse_a_damaged_checkpoint_alike(tmp_path: Path) -> None:
    run_ranks(2, resume, tmp_path, ON_2, range(1), 1)
    cut(tmp_path / "step-00000001" / "__1_0.distcp")
    results = run_ranks(3, refusal, tmp_path, ON_3)
    assert results[0] == results[1] == results[2] and results[0][1]
    assert "__1_0.distcp is damaged" in results[0][0]


# Kept and cleared


def test_the_last_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    for step in range(1, 5):
        save_small(tmp_path, step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    for name in ("step-00000004.partial-0a", "step-00000001.removed-0b", "step-00000003.replaced-0c"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    (tmp_path / "notes.txt").write_text("of the user")
    assert loaded_small(tmp_path) == 4
    save_small(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000004", "step-00000005"]
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced-0d")  # killed between two renames
    assert loaded_small(tmp_path) == 5
    save_small(tmp_path, 6)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000005", "step-00000006"]


# Full disks


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, way: str) -> list[tuple[str, list[str]]]:
    """On a rank: a save that fits, and two that the disk, or a limit on rank 1's files, cuts short."""
    model = built(ON_2)
    optimizer = adamw(model)
    save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, range(1))  # states triple it
    limit, found = resource.getrlimit(resource.RLIMIT_FSIZE), []
    if way == "limit" and dist.get_rank() == 1:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((folder / "step-00000001" / "__1_0.distcp").stat().st_size, limit[1])
        )
    for asynchronous in (False, True):
        with pytest.raises(OsdpError) as refused:
            saving = save_checkpoint(folder, model, optimizer, step=2, asynchronous=asynchronous)
            assert asynchronous and saving is not None
            train(model, optimizer, range(1, 2))
            saving.wait()
        dist.barrier()
        found.append((str(refused.value), sorted(os.listdir(folder))))
        dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    save_checkpoint(folder, model, None, step=3)  # what fits is saved again
    return found


@pytest.mark.parametrize("way", ["disk", "limit"])
def test_a_full_disk_is_the_same_error_on_all_ranks_and_the_last_checkpoint_stays(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with tiny_disk(folder) if way == "disk" else contextlib.nullcontext():
        results = run_ranks(2, fill, folder, way)
        reason = os.strerror(errno.ENOSPC if way == "disk" else errno.EFBIG)
        assert results[0] == results[1]
        for message, names in results[0]:
            assert names == ["step-00000001"]
            assert re.fullmatch(
                rf"rank [01] cannot save step 2 to {folder}: {reason}; free space, or save to another folder"
                r" \(step 1 stays as it was\)",
                message,
            )
        model = built(None, seed=2)
        for step in (1, 3):
            assert load_checkpoint(folder, model, step=step) is not None
