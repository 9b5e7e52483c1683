"""`osdp train` in real processes.

- Losses fall; two runs of one command have the same losses, bit for bit.
- A rank is killed and torchrun starts all again: the curve is that of a run without accident, bit for bit.
- Interrupted runs save and go on, with other ranks too.
- A rank that hangs ends the others within the timeout; whatever fails is said in one sentence.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from osdp.cli.main import main

TESTS = Path(__file__).parent
STEPS = 30
FSDP2_WARNS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of views that nobody changes in place
SAME = ("tiny_lm:build", "--steps", str(STEPS), "--lr", "3e-3", "--json", "--quiet")


def _read(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


class Process:
    """A command under way; its output is read as it comes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None, **settings: Any) -> None:
        self.popen = subprocess.Popen(
            command,
            cwd=TESTS,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **settings,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(stream, lines))
            for stream, lines in ((self.popen.stdout, self.lines), (self.popen.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def end(self, seconds: float = 200) -> int:
        code = self.popen.wait(seconds)
        for reader in self._readers:
            reader.join()
        return code

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.end()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, self.lines.copy()) if event["event"] == kind]

    def wait_for_step(self, number: int, seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not any(event["number"] >= number for event in self.events("step")):
            assert time.monotonic() < end and self.popen.poll() is None, "".join(self.lines + self.errors)
            time.sleep(0.01)

    def sentences(self) -> list[str]:
        return [line for line in self.errors if line.startswith("osdp: ")]


@contextmanager
def running(*processes: Process) -> Iterator[tuple[Process, ...]]:
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def torchrun(*arguments: str, restarts: int = 0) -> Process:
    run = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.1")
    return Process([sys.executable, "-m", "torch.distributed.run", *run, "-m", "osdp", "train", *arguments])


def alone(*arguments: str, **settings: Any) -> Process:
    return Process([sys.executable, "-m", "osdp", "train", *arguments], **settings)


def two_ranks(*command: str, **environment: str) -> list[Process]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = ({**world, **environment, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1"))
    return [Process([sys.executable, *command], each) for each in ranks]


def rank_process(launcher: Process, rank: int) -> int:
    """The process id of a rank that torchrun has started."""
    pid = launcher.popen.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"torchrun has no rank {rank}")


def losses(process: Process) -> dict[int, float]:
    return {event["number"]: event["loss"] for event in process.events("step")}


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
    """The same run, of which a rank is killed after it has saved; torchrun starts it once more."""
    folder = tmp_path_factory.mktemp("killed")
    options = ("--checkpoint", str(folder), "--save-every", "4", "--resume", "--validation", "0.1")
    with running(torchrun(*SAME, "--plan", str(plan_file), *options, restarts=1)) as (process,):
        process.wait_for_step(6)
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
    assert all(event["gradient_norm"] > 0 and event["tokens_per_second"] > 0 for event in whole.events("step"))


def test_a_killed_rank_costs_time_and_changes_no_bit(whole: Process, killed: tuple[Process, Path]) -> None:
    process, _ = killed
    events = process.events("step")
    (resume,) = process.events("resume")
    before = [event["number"] for event in events[: events.index(next_of(events, resume["step"] + 1, last=True))]]
    assert before[0] == 1 and resume["step"] in range(4, STEPS) and resume["step"] % 4 == 0
    expected = losses(whole)
    assert all(event["loss"] == expected[event["number"]] for event in events)  # of both attempts
    assert set(losses(process)) == set(expected)
    (lost,) = process.sentences()
    assert "another rank" in lost and f"--resume goes on from step {resume['step']} in" in lost
    assert "Traceback" not in "".join(process.errors)


def next_of(events: list[dict[str, Any]], number: int, *, last: bool) -> dict[str, Any]:
    found = [event for event in events if event["number"] == number]
    return found[-1 if last else 0]


@FSDP2_WARNS
def test_an_interrupted_run_goes_on_with_other_ranks(
    whole: Process, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--checkpoint", str(tmp_path), "--validation", "0.1")
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


def test_out_of_memory_names_the_plan_and_the_remedy() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))

    with running(alone("tiny_lm:huge", "--batch", "1", "--quiet", "--memory", "64GiB", preexec_fn=limit)) as (process,):
        assert process.end() == 1
    (sentence,) = process.sentences()
    assert "error: out of memory in the start" in sentence and "plan with a smaller --memory" in sentence
    assert "Traceback" not in "".join(process.errors)


@pytest.mark.parametrize("name", ["own_loop", "hugging_face", "pyramid"])
def test_the_examples_train(name: str) -> None:
    file = TESTS.parent / "examples" / f"{name}.py"
    if name == "own_loop":
        assert len(file.read_text().splitlines()) < 40
    with running(*two_ranks(str(file), STEPS="4")) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "".join(ranks[0].errors + ranks[1].errors)
    found = [float(line.split("loss ")[1]) for line in ranks[0].lines if line.startswith("step ")]
    assert len(found) == 4 and found[-1] < found[0]


# ---- one process, no training: bad input is one sentence, exit code 2


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
    assert "cannot read the data" in refused(capsys, "tiny_lm:build", "--data", str(tmp_path / "none.txt"))
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
    assert "the plan is for 2 ranks (2xCPU) but 1 run" in refused(capsys, "tiny_lm:build", *plan)
    assert "has 4 devices but 1 ranks run" in refused(capsys, "tiny_lm:build", "--cluster", "4xCPU")


@FSDP2_WARNS
def test_the_checkpoint_of_another_run_is_refused(
    killed: tuple[Process, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = killed
    to_folder = ("--checkpoint", str(folder), "--validation", "0.1", "--global-batch", "8")
    assert f"has a checkpoint, step-{STEPS:08}; go on from it" in refused(capsys, "tiny_lm:build", *to_folder)
    resume = (*to_folder, "--resume", "--seed", "1")
    assert "is of another run: its seed is 0, here it is 1" in refused(capsys, "tiny_lm:build", *resume)
    assert "is of another model" in refused(capsys, "tiny_lm:wider", *to_folder, "--resume")
