"""`osdp train` in real processes.

- Losses fall; two runs of one command have the same losses, bit for bit.
- A rank is killed while all save and train, and torchrun starts all again: the curve is that of a run without accident,
  bit for bit.
- Interrupted runs save and go on, with other ranks too.
- A rank that hangs ends the others within the timeout; whatever fails is said in one sentence.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection import one_in
from training_runs import (
    FSDP2_WARNS,
    SAME,
    STEPS,
    TESTS,
    Process,
    alone,
    losses,
    rank_process,
    running,
    torchrun,
    two_ranks,
)

from osdp.cli.main import main
from osdp.errors import OsdpError
from osdp.training.failures import StopRequest
from osdp.training.world import World, started


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several modes at once, two micro-batches a step."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    modes = ("--pin", "tokens=keep", "--pin", "blocks.0=free", "--pin", "blocks.1=replicate")
    options = ("--cluster", "2xCPU", "--precision", "fp32", "--global-batch", "8", "--quiet")
    assert main(["plan", "tiny_lm:build", *options, *modes, "-o", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def whole(plan_file: Path) -> Process:
    """A run without accident."""
    with running(torchrun(*SAME, "--plan", str(plan_file), "--validation", "0.1")) as (process,):
        assert process.end() == 0, "".join(process.errors)
    return process


@pytest.fixture(scope="module")
def killed(plan_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Process, Path]:
    """The same run, which saves meanwhile, and of which a rank is killed; torchrun starts it once more."""
    folder = tmp_path_factory.mktemp("killed")
    options = ("--checkpoint", str(folder), "--save-every", "4", "--async-save", "--resume", "--validation", "0.1")
    with running(torchrun(*SAME, "--plan", str(plan_file), *options, restarts=1)) as (process,):
        process.wait_for_step(6)
        process.wait_until((folder / "step-00000004").exists)
        os.kill(rank_process(process, 1), signal.SIGKILL)
        assert process.end() == 0, "".join(process.errors)
    return process, folder


def test_losses_fall_and_the_plan_is_measured(whole: Process, plan_file: Path) -> None:
    curve = losses(whole)
    assert list(curve) == list(range(1, STEPS + 1))
    assert sum(curve[n] for n in range(STEPS - 4, STEPS + 1)) / 5 < curve[1] - 1.5
    (start,), (end,) = whole.events("start"), whole.events("end")
    assert start["plan"] == json.loads(plan_file.read_text())
    assert start["plan"]["batch_size"] * start["plan"]["accumulation"] == 4
    assert end["predicted_step_seconds"] == start["plan"]["predicted"]["step_seconds"] > 0
    assert end["measured_step_seconds"] > 0 and end["measured_peak_bytes"] > 0
    last = whole.events("step")[-1]
    assert last["validation_loss"] == pytest.approx(last["loss"], abs=0.5)
    for event in whole.events("step"):
        assert event["predicted_seconds"] == end["predicted_step_seconds"]
        assert event["predicted_peak_bytes"] == end["predicted_peak_bytes"]
        assert event["seconds"] > event["data_seconds"] > 0 and event["seconds"] > event["waited_seconds"]
    (warning,) = whole.warnings()  # data sheets are far off for such a model, on a processor
    assert "times the predicted" in warning and "2xCPU is not measured" in warning
    assert all(event["gradient_norm"] > 0 and event["tokens_per_second"] > 0 for event in whole.events("step"))


def test_two_runs_of_one_command_have_the_same_losses() -> None:
    command = ("tiny_lm:build", "--steps", "4", "--batch", "4", "--json", "--quiet", "--no-split", "--seed", "3")
    with running(alone(*command), alone(*command)) as runs:
        assert [run.end() for run in runs] == [0, 0]
    first, second = map(losses, runs)
    assert first == second and len(set(first.values())) == 4


def test_a_killed_rank_costs_time_and_changes_no_bit(whole: Process, killed: tuple[Process, Path]) -> None:
    process, _ = killed
    events = process.events("step")
    (resume,) = process.events("resume")
    before = [event["number"] for event in events[: events.index(next_of(events, resume["step"] + 1, last=True))]]
    assert before[0] == 1 and resume["step"] in range(4, STEPS) and resume["step"] % 4 == 0
    expected = losses(whole)
    assert all(event["loss"] == expected[event["number"]] for event in events)  # of both attempts
    assert set(losses(process)) == set(expected)
    assert any(event["saving"] for event in events)  # training went on beside a save
    (lost,) = process.sentences()
    assert "another rank" in lost and f"--resume goes on from step {resume['step']} in" in lost
    assert "Traceback" not in "".join(process.errors)


def test_a_signal_does_not_cut_short_what_a_failure_says() -> None:
    """torchrun sends SIGTERM to the ranks that are left, and does so while they find out why they fail."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as wish:
        with pytest.raises(OsdpError, match="lost"), wish.heard():
            raise OsdpError("lost another rank")
        signal.raise_signal(signal.SIGTERM)  # would end this process
        assert wish.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    with StopRequest() as wish:
        with wish.heard():
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before  # nothing failed: a signal ends the process again


def next_of(events: list[dict[str, Any]], number: int, *, last: bool) -> dict[str, Any]:
    found = [event for event in events if event["number"] == number]
    return found[-1 if last else 0]


@FSDP2_WARNS
def test_an_interrupted_run_goes_on_with_other_ranks(
    whole: Process, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--checkpoint", str(tmp_path), "--validation", "0.1", "--save-every", "2", "--async-save")
    with running(torchrun(*SAME, "--plan", str(plan_file), *options)) as (process,):
        process.wait_for_step(5)
        os.killpg(process.popen.pid, signal.SIGINT)  # as a terminal does: to torchrun and its ranks
        assert process.end() != 0
    done = max(losses(process))
    assert process.sentences() == [
        f"osdp: interrupted after step {done}; --resume goes on from step {done} in {tmp_path}\n"
    ]
    assert 5 <= done < STEPS and not process.events("end")
    assert main(["train", *SAME, *options, "--resume", "--global-batch", "8"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [done]
    curve = {event["number"]: event["loss"] for event in events if event["event"] == "step"}
    expected = losses(whole)
    assert list(curve) == list(range(done + 1, STEPS + 1))
    assert list(curve.values()) == pytest.approx([expected[number] for number in curve], abs=2e-4)


@FSDP2_WARNS
def test_fp16_scales_its_loss_skips_what_overflows_and_resumes_with_the_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def curve(*options: str) -> dict[int, tuple[float, float | None]]:
        given = ("tiny_lm:build", "--lr", "3e-3", "--json", "--quiet", "--global-batch", "4")
        assert main(["train", *given, *options]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {e["number"]: (e["loss"], e["gradient_norm"]) for e in events if e["event"] == "step"}

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**24))  # too large
    truth = curve("--precision", "fp32", "--steps", "12")
    whole = curve("--precision", "fp16", "--steps", "12")
    skipped = [number for number, (_, norm) in whole.items() if norm is None]
    assert skipped[:6] == [1, 2, 3, 4, 5, 6] and len(skipped) < 12
    assert whole[1][0] == pytest.approx(truth[1][0], rel=0.01) and whole[12][0] < whole[1][0]
    saved = ("--checkpoint", str(tmp_path), "--precision", "fp16")
    first = curve(*saved, "--steps", "4")
    rest = curve(*saved, "--steps", "12", "--resume")
    assert {**first, **rest} == whole


def test_sigterm_without_a_folder_ends_with_143() -> None:
    with running(alone(*SAME, "--global-batch", "4", "--no-split", "--no-recompute")) as (process,):
        process.wait_for_step(3)
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 128 + signal.SIGTERM
    done = max(losses(process))
    says = f"osdp: interrupted after step {done}; nothing is saved, as --checkpoint was not given\n"
    assert process.sentences() == [says] and done < STEPS


def test_a_rank_that_hangs_ends_the_other_within_the_timeout(plan_file: Path) -> None:
    arguments = (*SAME, "--plan", str(plan_file), "--timeout", "8", "--steps", "100000")
    ranks = two_ranks("-m", "osdp", "train", *arguments)
    with running(*ranks):
        ranks[0].wait_for_step(3)
        ranks[1].popen.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks[0].end() == 1
        assert time.monotonic() - stopped < 8 + 5
    (sentence,) = ranks[0].sentences()
    assert "error: rank 0 waited 8 s in step" in sentence and "another rank hangs or is gone" in sentence
    assert "Traceback" not in "".join(ranks[0].errors)


def test_a_port_that_is_taken_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": 0}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        told = rf"127\.0\.0\.1:{port}, where rank 0 is to meet the others, is taken by another process; set MASTER_PORT"
        with pytest.raises(OsdpError, match=told), started(timeout_seconds=5):
            pass


def store_server(sender: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    time.sleep(60)


def test_a_rank_speaks_where_the_one_that_holds_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking who speaks first had no limit: of three ranks with the first stopped, one hung for ever."""
    monkeypatch.setattr("osdp.training.world._ANSWER_SECONDS", 0.5)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=store_server, args=(sender,), daemon=True)
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", receiver.recv(), is_master=False)
        world = World(1, 3, 1, 3, torch.device("cpu"), store)
        assert world.speaks_first() and not world.speaks_first()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        while "\nState:\tT" not in Path(f"/proc/{server.pid}/status").read_text():  # on a busy machine it still answers
            time.sleep(0.01)
        began = time.monotonic()
        assert world.speaks_first()
        assert time.monotonic() - began < 10
    finally:
        server.kill()
        server.join()


def test_out_of_memory_names_the_plan_and_the_remedy() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))

    with running(alone("tiny_lm:huge", "--batch", "1", "--quiet", "--memory", "64GiB", preexec_fn=limit)) as (process,):
        assert process.end() == 1
    (sentence,) = process.sentences()
    assert "error: out of memory in the start" in sentence and "plan with a smaller --memory" in sentence
    assert "Traceback" not in "".join(process.errors)


@pytest.mark.parametrize("name", one_in(3, ["own_loop", "hugging_face", "pyramid"]))
def test_the_examples_train(name: str) -> None:
    file = TESTS.parent / "examples" / f"{name}.py"
    if name == "own_loop":
        assert len(file.read_text().splitlines()) < 40
    with running(*two_ranks(str(file), STEPS="4")) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "".join(ranks[0].errors + ranks[1].errors)
    found = [float(line.split("loss ")[1]) for line in ranks[0].lines if line.startswith("step ")]
    assert len(found) == 4 and found[-1] < found[0]


# ---- one process, no training: bad input is one sentence, exit code 2


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """As another run has it; see [Note: One run] in osdp.training.checkpointing."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments, "--quiet"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("osdp: error: ") and errors.count("\n") == 1
    return errors


def test_bad_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    sentence = refused(capsys, "tiny_lm:build", "--data", str(short))
    assert "the data ends after 9 tokens, and one window has 33" in sentence
    assert "it cannot be read (No such file or directory)" in refused(
        capsys, "tiny_lm:build", "--data", str(tmp_path / "none.txt")
    )
    cut = tmp_path / "cut.bin"
    cut.write_bytes(bytes(1001))
    assert "1,001 bytes, which is no whole number of uint16" in refused(capsys, "tiny_lm:build", "--data", str(cut))
    assert "the data has token 122, and the model knows 64" in refused(capsys, "tiny_lm:few_tokens")
    assert "leaves none to train on" in refused(
        capsys, "tiny_lm:build", "--validation", "0.99999", "--data", str(_text(tmp_path, 100))
    )


def _text(folder: Path, size: int) -> Path:
    file = folder / f"{size}.txt"
    file.write_bytes(b"x" * size)
    return file


def test_models_that_predict_no_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a Linear that takes [1, 8]" in refused(capsys, "tiny_lm:numbers")


def test_arguments_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    plan = ("--plan", str(plan_file))
    assert "has settled --batch, --no-split" in refused(capsys, "tiny_lm:build", *plan, "--batch", "2", "--no-split")
    assert "exclude each other" in refused(capsys, "tiny_lm:build", "--batch", "2", "--global-batch", "4")
    assert "--resume needs a folder" in refused(capsys, "tiny_lm:build", "--resume")
    assert "--async-save needs a folder" in refused(capsys, "tiny_lm:build", "--async-save")
    assert "the plan is for 2 ranks (2xCPU) but 1 run" in refused(capsys, "tiny_lm:build", *plan)
    assert "has 4 devices but 1 ranks run" in refused(capsys, "tiny_lm:build", "--cluster", "4xCPU")


@FSDP2_WARNS
def test_the_checkpoint_of_another_run_is_refused(
    killed: tuple[Process, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = killed
    to_folder = ("--checkpoint", str(folder), "--validation", "0.1", "--global-batch", "8")
    assert f"has a checkpoint, step-{STEPS:08}; go on from it" in refused(capsys, "tiny_lm:build", *to_folder)
    resume = (*to_folder, "--resume", "--seed", "1")
    assert "is of another run: its seed is 0, here it is 1" in refused(capsys, "tiny_lm:build", *resume)
    assert "is of another model" in refused(capsys, "tiny_lm:wider", *to_folder, "--resume")
    with folder_lock(folder):
        assert f"--checkpoint {folder} is in use by another run" in refused(
            capsys, "tiny_lm:build", *to_folder, "--resume"
        )
    other_data = (*to_folder, "--resume", "--data", str(_text(tmp_path, 5000)))
    assert "is of another run: its data is" in refused(capsys, "tiny_lm:build", *other_data)
    assert main(["train", "tiny_lm:build", *to_folder, "--resume", "--steps", str(STEPS), "--json"]) == 0  # its own
    assert f'"event": "resume", "step": {STEPS}' in capsys.readouterr().out


@FSDP2_WARNS
def test_a_folder_that_holds_something_else_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: Path) -> str:
        return refused(capsys, "tiny_lm:build", "--resume", "--checkpoint", str(folder))

    file = _text(tmp_path, 10)
    assert f"--checkpoint {file} is no folder (File exists)" in said(file)
    assert f"--checkpoint {file}/run is no folder (Not a directory)" in said(file / "run")
    inside = tmp_path / "run" / "step-00000007"
    inside.mkdir(parents=True)
    (inside / "checkpoint.json").write_text("{}")
    assert f"{inside} is itself a checkpoint; give the folder it is in, {tmp_path / 'run'}" in said(inside)
    assert main(["train", "tiny_lm:build", "--resume", "--checkpoint", str(inside.parent), "--quiet"]) == 1
    assert f"{inside}/checkpoint.json is damaged: it is no JSON of a checkpoint" in capsys.readouterr().err
