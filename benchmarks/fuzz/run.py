"""Runs cases in this process, each within a bound, and judges what became of them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.fuzz.arguments import argument_case
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.clusters import cluster_case
from benchmarks.fuzz.configs import config_case
from benchmarks.fuzz.data import data_case
from benchmarks.fuzz.plans import plan_case
from osdp.cli.main import main
from osdp.model.capture import capture as _capture

BOUND_SECONDS = 60.0  # of a case, on a machine that others use too; what takes longer is a hang
MODEL = "gpt-tiny"
KINDS = ("plan files", "cluster files", "configurations", "data files", "arguments")
EXIT_CODES = (0, 1, 2, 3)
TRACEBACK, HANG, ACCEPTED, WRONG_CODE = "traceback", "hang", "nonsense accepted", "wrong exit code"
REFUSED = "good input refused"
_PLANS = (
    ("--cluster", "4xA100-80GB", "--batch", "2"),
    ("--cluster", "2x2xCPU", "--batch", "2", "--memory", "8MiB", "--precision", "fp32"),
    ("--cluster", "CPU", "--batch", "2", "--precision", "fp32"),
)


class _Late(BaseException):
    """Raised where a case has passed its bound; no command catches it."""


@dataclass
class Report:
    """What became of the cases of one kind."""

    kind: str
    cases: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    slowest: str = ""
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)  # what each case was told


def fuzz(kind: str, cases: int, *, seed: int = 0, seconds: float = float("inf")) -> Report:
    """Runs so many cases of a kind, or as many as fit into the seconds; equal seeds give equal cases."""
    report = Report(kind)
    began = time.monotonic()
    with mock.patch("osdp.model.capture.capture", _trace_once):
        for number in range(cases):
            if time.monotonic() - began > seconds:
                break
            with _empty_folder() as folder:
                case = _make(kind, folder, random.Random(f"{seed}/{kind}/{number}"))
                _judge(report, number, case, *_run(case))
    report.seconds = time.monotonic() - began
    return report


_traced: dict[Any, Any] = {}


def _trace_once(model: Any, inputs: Any, **details: Any) -> Any:
    """As osdp.model.capture; all but configurations take the same model, which need not be traced for every case."""
    if details["name"] != MODEL:
        return _capture(model, inputs, **details)
    key = details["compute_dtype"], details["seq_len"]
    if key not in _traced:
        _traced[key] = _capture(model, inputs, **details)
    return _traced[key]


@functools.cache
def _plans() -> tuple[dict[str, Any], ...]:
    """Good plans, to be changed."""
    documents = []
    for options in _PLANS:
        _, code, out, err, raised = _run(Case("", ("plan", MODEL, *options, "--quiet", "--json")))
        assert (code, raised) == (0, None), err
        documents.append(json.loads(out))
    return tuple(documents)


def _make(kind: str, folder: Path, chance: random.Random) -> Case:
    if kind == "plan files":
        return plan_case(folder, chance.choice(_plans()), chance)
    if kind == "arguments":
        plan = folder / "plan.json"
        plan.write_text(json.dumps(_plans()[0]))
        return argument_case(chance, plan)
    makers = {"cluster files": cluster_case, "configurations": config_case, "data files": data_case}
    return makers[kind](folder, chance)


@contextlib.contextmanager
def _empty_folder() -> Iterator[Path]:
    folder, before = Path(tempfile.mkdtemp()), Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _past_python(err: io.StringIO) -> Iterator[None]:
    """Adds what libraries write to standard error by its number, past Python's own."""
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            file.seek(0)
            err.write(file.read().decode(errors="replace"))


def _run(case: Case) -> tuple[float, int | None, str, str, BaseException | None]:
    """Seconds, exit code, what was printed, and what escaped."""
    out, err = io.StringIO(), io.StringIO()
    code: int | None = None
    raised: BaseException | None = None

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, BOUND_SECONDS)
    began = time.monotonic()
    try:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _past_python(err)
        with mock.patch.dict(os.environ, case.environment), streams[2], streams[0], streams[1]:
            code = main(case.argv)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raised = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return time.monotonic() - began, code, out.getvalue(), err.getvalue(), raised


def _judge(
    report: Report, number: int, case: Case, seconds: float, code: int | None, out: str, err: str, raised: Any
) -> None:
    report.cases += 1
    if seconds > report.slowest_seconds:
        report.slowest_seconds, report.slowest = seconds, case.what
    report.sentences.append(f"{case.what}: {code}: {err.strip()[-300:]}")
    fault = _fault(case, seconds, code, err, raised)
    if code is not None:
        report.codes[code] += 1
    if fault is None:
        return
    report.faults[fault] += 1
    why = "".join(traceback.format_exception(raised)[-3:]) if raised is not None else err.strip()[-500:]
    report.examples.append(f"{fault}: case {number}, {case.what} (code {code}, {seconds:.1f} s): {why}")


def _fault(case: Case, seconds: float, code: int | None, err: str, raised: BaseException | None) -> str | None:
    if isinstance(raised, _Late) or seconds > BOUND_SECONDS:
        return HANG
    if raised is not None or "Traceback" in err:
        return TRACEBACK
    if case.nonsense and code == 0:
        return ACCEPTED
    if case.good and code != 0:
        return REFUSED
    said = [line for line in err.splitlines() if line.startswith("osdp: error: ")]
    if code not in EXIT_CODES or (case.nonsense and code != 2) or (code in (1, 2) and len(said) != 1):
        return WRONG_CODE
    return None
