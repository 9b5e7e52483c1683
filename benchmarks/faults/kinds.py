"""The kinds of faults, each with what must hold afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.job import MODEL, Ended, Job

STEPS, SAVE_EVERY, TIMEOUT_SECONDS = 10, 2, 60
STOPPED_SECONDS = 20  # the time-out where only that can notice the fault
WAIT_SECONDS = 400.0  # for a job on a machine that has other work
LATE_SECONDS = 10  # beyond the time-out: what a process takes to end


@dataclass(frozen=True)
class Outcome:
    """One case. `problems` are what did not hold, in words; `noticed_seconds` where ranks had to notice something."""

    kind: str
    detail: str
    problems: tuple[str, ...]
    noticed_seconds: float | None = None


class Unprepared(Exception):
    """A run that nothing is to happen to has failed."""


class Faults:
    """Runs cases against one uninterrupted run for each number of ranks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._curves: dict[int, dict[int, float]] = {}
        self._plans = tempfile.TemporaryDirectory(prefix="osdp-faults-")

    def train(self, ranks: int, folder: Path | None, *more: str) -> list[str]:
        """A run under the one plan of so many ranks, which is made once."""
        plan = Path(self._plans.name) / f"{ranks}.json"
        if not plan.exists():
            sizes = ("--cluster", f"{ranks}xCPU", "--global-batch", "24", "--precision", "fp32", "--no-split")
            ended = Job(["plan", MODEL, *sizes, "-o", str(plan), "--quiet"], 1).end(WAIT_SECONDS)
            _prepared(ended)
        return [*_train(folder), "--plan", str(plan), *more]

    def curve(self, ranks: int) -> dict[int, float]:
        """The losses of a run that nothing happens to."""
        if ranks not in self._curves:
            ended = Job(self.train(ranks, None), ranks).end(WAIT_SECONDS)
            _prepared(ended)
            assert len(ended.losses) == STEPS, ended.said
            self._curves[ranks] = dict(ended.losses)
        return self._curves[ranks]

    def killed(self, phase: str, number: int) -> Outcome:
        return self._struck(phase, number, signal.SIGKILL)

    def stopped(self, number: int) -> Outcome:
        return self._struck("backward", number, signal.SIGSTOP)

    def _struck(self, phase: str, number: int, sent: signal.Signals) -> Outcome:
        """A rank is killed or stopped; the others must notice, and the run must go on as if nothing had been."""
        draw = random.Random(f"{self._seed}/{phase}/{sent}/{number}")
        ranks = draw.choice((2, 3, 4))
        victim = draw.randrange(ranks)
        call = draw.randint(1, {"saving": STEPS // SAVE_EVERY, "planning": 1, "profiling": 1}.get(phase, STEPS))
        if phase == "planning":
            victim = 0  # rank 0 plans
        fault = {"phase": phase, "number": call, "seconds": draw.uniform(0, 0.05), "signal": int(sent)}
        detail = f"rank {victim} of {ranks}, {phase} {call}"
        with _folder() as folder:
            limit = STOPPED_SECONDS if sent == signal.SIGSTOP else TIMEOUT_SECONDS
            arguments = self.train(ranks, folder, "--timeout", str(limit))
            if phase in ("planning", "profiling"):
                arguments = _profile(folder) if phase == "profiling" else [*_train(folder), *_PLANNED]
            job = Job(arguments, ranks, {victim: fault})
            ended = job.end(WAIT_SECONDS)
            problems = _noticed(ended, victim, limit) + _clean(job, ended)
            if phase != "profiling":
                problems += self._goes_on(folder, ranks)
        return Outcome(f"{sent.name} in {phase}", detail, tuple(problems), ended.noticed_seconds)

    def _goes_on(self, folder: Path, ranks: int) -> list[str]:
        """Resumes, and compares the losses with those of the uninterrupted run."""
        job = Job(self.train(ranks, folder, "--resume"), ranks)
        ended = job.end(WAIT_SECONDS)
        if set(ended.codes) != {0}:
            return [f"resuming ended with {ended.codes}: {_last_line(ended)}"]
        curve = self.curve(ranks)
        wrong = [step for step, loss in ended.losses.items() if loss != curve[step]]
        problems = [f"the losses of steps {wrong} differ from the uninterrupted run's"] if wrong else []
        names = sorted(path.name for path in folder.iterdir())
        if any(not name.startswith("step-") for name in names) or f"step-{STEPS:08d}" not in names:
            problems.append(f"the folder has {names}")
        return problems + _clean(job, ended)

    def full_disk(self, number: int) -> Outcome:
        """No file may grow beyond a size, from the first save on."""
        limit = random.Random(f"{self._seed}/disk/{number}").choice((1000, 4000, 20_000))
        with _folder() as folder:
            job = Job(self.train(2, folder), 2, limit_file_bytes=limit)
            ended = job.end(WAIT_SECONDS)
            problems = _codes(ended, (1, 1)) + _clean(job, ended)
            problems += self._goes_on(folder, 2)
        return Outcome("full disk", f"files of {limit:,} bytes at most", tuple(problems))

    def read_only(self, number: int) -> Outcome:
        """A folder of a file system that takes no files."""
        job = Job(self.train(2, Path("/sys/kernel/osdp-checkpoints")), 2)
        ended = job.end(WAIT_SECONDS)
        return Outcome("read-only folder", "", tuple(_codes(ended, (2, 2)) + _clean(job, ended)))

    def damaged(self, number: int) -> Outcome:
        """One file of the newest checkpoint is cut, changed in one byte, or gone; the others are as they were."""
        draw = random.Random(f"{self._seed}/damaged/{number}")
        with _folder() as folder:
            self._saved(folder)
            files = sorted(path for path in _newest(folder).rglob("*") if path.is_file())
            file = files[number % len(files)]
            way = ("cut", "changed", "gone")[number // len(files) % 3]
            whole = file.read_bytes()
            _damage(file, way, draw)
            job = Job(self.train(2, folder, "--resume"), 2)
            ended = job.end(WAIT_SECONDS)
            problems = _codes(ended, (1, 1)) + _clean(job, ended)
            file.write_bytes(whole)
            problems += self._goes_on(folder, 2)
        return Outcome("damaged checkpoint", f"{file.name} {way}", tuple(problems))

    def two_runs(self, number: int) -> Outcome:
        """A second run on the folder of one that is stopped in the middle of a save, and then goes on."""
        draw = random.Random(f"{self._seed}/two/{number}")
        call = draw.randint(1, STEPS // SAVE_EVERY)
        fault = {"phase": "saving", "number": call, "seconds": draw.uniform(0, 0.02), "signal": int(signal.SIGSTOP)}
        with _folder() as folder:
            first = Job(self.train(2, folder), 2, {0: fault})
            if first.wait_until_stopped(0, WAIT_SECONDS):
                second = Job(self.train(2, folder, "--resume"), 2)
                refused = second.end(WAIT_SECONDS)
                problems = _codes(refused, (2, 2)) + _clean(second, refused)
                first.go_on(0)
            else:
                problems = ["the first run was never stopped"]
            ended = first.end(WAIT_SECONDS)
            problems += _codes(ended, (0, 0)) + _clean(first, ended)
            wrong = [step for step, loss in ended.losses.items() if loss != self.curve(2)[step]]
            problems += [f"the losses of steps {wrong} of the first run differ"] if wrong else []
            problems += self._goes_on(folder, 2)
        return Outcome("two runs on one folder", f"in save {call}", tuple(problems))

    def _saved(self, folder: Path) -> None:
        ended = Job(self.train(2, folder, "--steps", str(STEPS - 2)), 2).end(WAIT_SECONDS)
        _prepared(ended)


def kinds(faults: Faults) -> dict[str, Callable[[int], Outcome]]:
    """Every kind of fault by its name; each takes the number of a case."""

    def killed(phase: str) -> Callable[[int], Outcome]:
        return lambda number: faults.killed(phase, number)

    phases = ("forward", "backward", "saving", "planning", "profiling")
    return {
        **{f"kill-{phase}": killed(phase) for phase in phases},
        "stop": faults.stopped,
        "full-disk": faults.full_disk,
        "read-only": faults.read_only,
        "damaged": faults.damaged,
        "two-runs": faults.two_runs,
        "link-cut": link_cut,
    }


def link_cut(number: int) -> Outcome:
    """Two hosts; the link of one is taken away while they train. On a network that works, the run goes on."""
    from benchmarks.cluster import SimulatedCluster
    from benchmarks.cluster.network import NETNS, ClusterUnavailable
    from benchmarks.faults.cut import trained_on

    try:
        with _folder() as folder:
            arguments = [*_train(folder), *_PLANNED, "--timeout", str(STOPPED_SECONDS)]
            with SimulatedCluster(hosts=2, across=None) as cluster:
                first = trained_on(cluster, [*arguments, "--steps", "100000"], WAIT_SECONDS, cut=True)
            problems = [] if first.codes == [1, 1] else [f"ranks ended with {first.codes}"]
            if first.noticed_seconds is None or first.noticed_seconds > STOPPED_SECONDS + LATE_SECONDS:
                problems.append(f"noticed after {first.noticed_seconds} s")
            last = max(first.losses, default=0) + 2
            with SimulatedCluster(hosts=2, across=None) as cluster:
                again = trained_on(cluster, [*arguments, "--steps", str(last), "--resume"], WAIT_SECONDS, cut=False)
            problems += [] if again.codes == [0, 0] else [f"resuming ended with {again.codes}"]
            wrong = [step for step, loss in again.losses.items() if first.losses.get(step, loss) != loss]
            problems += [f"the losses of steps {wrong} differ"] if wrong else []
            problems += ["a traceback"] if "Traceback" in first.said + again.said else []
        left = [each.name for each in NETNS.glob(f"osdp-{os.getpid()}-*")]
        problems += [f"namespaces left behind: {left}"] if left else []
    except ClusterUnavailable as error:
        return Outcome("link that drops", f"not run: {error}", ("not run",))
    return Outcome("link that drops", "host 1 of 2", tuple(problems), first.noticed_seconds)


_PLANNED = ("--global-batch", "24", "--no-split")  # where a run plans for itself


def _train(folder: Path | None) -> list[str]:
    sizes = ["--steps", str(STEPS), "--timeout", str(TIMEOUT_SECONDS)]
    sizes += ["--warmup", "1", "--decay-steps", str(STEPS)]  # also where a run is to end sooner
    checkpointing = ["--checkpoint", str(folder), "--save-every", str(SAVE_EVERY)] if folder is not None else []
    return ["train", MODEL, *sizes, *checkpointing, "--json", "--quiet"]


def _profile(folder: Path) -> list[str]:
    times = ["--seconds", "5", "--timeout", str(TIMEOUT_SECONDS)]
    return ["profile", "-o", str(folder / "profile.toml"), *times, "--json", "--quiet"]


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="osdp-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _newest(folder: Path) -> Path:
    return max(folder.glob("step-*"))


def _damage(file: Path, way: str, draw: random.Random) -> None:
    whole = bytearray(file.read_bytes())
    if way == "gone":
        file.unlink()
        return
    if way == "cut":
        whole = whole[: len(whole) // 2]
    else:
        whole[draw.randrange(len(whole))] ^= 0xFF
    file.write_bytes(bytes(whole))


def _noticed(ended: Ended, victim: int, timeout_seconds: float) -> list[str]:
    """The others end with 1, and in time: where one dies at once, where one hangs after the time-out."""
    others = [code for rank, code in enumerate(ended.codes) if rank != victim]
    problems = [] if set(others) == {1} else [f"the other ranks ended with {others}: {_last_line(ended)}"]
    if ended.noticed_seconds is None:
        problems.append("the fault did not happen, or a rank did not end")
    elif ended.noticed_seconds > timeout_seconds + LATE_SECONDS:
        problems.append(f"noticed after {ended.noticed_seconds:.0f} s, with a time-out of {timeout_seconds:.0f} s")
    return problems


def _prepared(ended: Ended) -> None:
    if set(ended.codes) != {0}:
        raise Unprepared(f"it ended with {ended.codes}: {_last_line(ended)}")


def _codes(ended: Ended, expected: tuple[int, ...]) -> list[str]:
    return [] if ended.codes == expected else [f"ended with {ended.codes}, not {expected}: {_last_line(ended)}"]


def _clean(job: Job, ended: Ended) -> list[str]:
    time.sleep(0.1)
    left = job.left_behind()
    problems = [f"{left} processes left behind"] if left else []
    return problems + (["a traceback"] if ended.has_traceback else [])


def _last_line(ended: Ended) -> str:
    lines = [line for line in ended.said.splitlines() if line.startswith("osdp:")] or ended.said.splitlines()
    return lines[-1][:300] if lines else "nothing was said"
