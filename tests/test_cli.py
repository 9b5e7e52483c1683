"""Claims: help is immediate and teaches; answers are on stdout, one document with --json; bad input is one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import osdp
from osdp.cli import plan as plan_command
from osdp.cli.main import main
from osdp.cli.progress import PlainProgress, describe
from osdp.cluster import devices
from osdp.errors import OsdpError, UsageError
from osdp.files import write_json
from osdp.model.source import presets
from osdp.planfile import Plan
from osdp.sharding import MODES

HEAVY = ("torch", "highspy", "transformers", "rich", "numpy")
TINY = ("plan", "gpt-tiny", "--cluster", "4xRTX-TITAN")


def _osdp(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "osdp", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
    )


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


# ---- immediate


def test_importing_and_building_the_parser_load_nothing_heavy() -> None:
    code = "import sys, osdp, osdp.cli.main as m; m.build_parser(); print([n for n in {} if n in sys.modules])"
    assert _python(code.format(HEAVY)).strip() == "[]"


@pytest.mark.parametrize("command", ["models", "devices"])
def test_the_catalogues_need_no_torch(command: str) -> None:
    code = (
        "import sys; from osdp.cli.main import main; code = main([{!r}]);"
        "print('LOADED', code, [n for n in ('torch', 'highspy', 'transformers') if n in sys.modules])"
    )
    assert _python(code.format(command)).splitlines()[-1] == "LOADED 0 []"


def test_bad_arguments_are_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys; from osdp.cli.main import main;"
        "code = main(['plan', 'gpt-tiny', '--cluster', '8xA100-80GB', '--batch', '0']);"
        "print(code, 'torch' in sys.modules)"
    )
    assert _python(code) == "2 False\n"


def test_help_takes_less_than_a_second() -> None:
    _osdp("--help")  # compiled files are there from now on
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert _osdp("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_the_public_names_are_there_and_few() -> None:
    errors = {
        name
        for name in osdp.__all__
        if isinstance(getattr(osdp, name), type) and issubclass(getattr(osdp, name), Exception)
    }
    assert len(set(osdp.__all__) - errors - {"__version__"}) <= 12
    code = "import osdp; print([getattr(osdp, name).__name__ for name in osdp.__all__ if name != '__version__'])"
    assert _python(code).strip() == str([name for name in osdp.__all__ if name != "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'shard'"):
        osdp.shard  # noqa: B018


def test_plan_is_the_function_whatever_is_imported_first() -> None:
    for first in ("osdp.planfile", "osdp.cli.plan", "osdp.api"):
        assert _python(f"import {first}, osdp; print(callable(osdp.plan))") == "True\n"


def test_the_wheel_has_the_data_and_the_command(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    source = tmp_path / "source"
    shutil.copytree(root / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in (root / "pyproject.toml", root / "LICENSE", *root.glob("README.md")):
        shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("osdp_torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(f"osdp_torch-{osdp.__version__}.dist-info/entry_points.txt").decode()
    assert {"osdp/cluster/devices.toml", "osdp/model/presets.toml", "osdp/py.typed", "osdp/cli/main.py"} <= names
    assert "osdp/training/text/alice.txt" in names
    assert "osdp = osdp.__main__:main" in commands


# ---- help teaches


def test_version() -> None:
    assert _osdp("--version").stdout == f"osdp {osdp.__version__}\n"


COMMANDS = ("plan", "explain", "diff", "whatif", "size", "report", "trace", "graph", "train", "devices", "completion")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_fits_80_columns(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.startswith("usage: osdp")


def test_the_help_of_plan_explains_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    explained = {words[0] for words in lines if len(words) == 2}
    assert set(MODES) <= explained


# ---- bad input: one sentence, exit code 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--memory", "-3GiB"), "less than one byte; give a positive size"),
        (("--memory", "0"), "less than one byte; give a positive size"),
        (("--memory", "16"), "memory size '16' has no unit; write it as '16GiB'"),
        (("--memory", "16G"), "unknown unit; use B, KiB"),
        (("--batch", "0"), "--batch: 0 is below 1; give a whole number of at least 1"),
        (("--batch", "-4"), "--batch: -4 is below 1"),
        (("--global-batch", "1.5"), "'1.5' is not a whole number"),
        (("--seq-len", "0"), "--seq-len: 0 is below 1"),
        (("--batch", "2", "--global-batch", "64"), "exclude each other; --batch fixes"),
        (("--pin", "lm_head"), "is not PATTERN=MODE; write it as 'lm_head=keep'"),
        (("--pin", "=keep"), "is not PATTERN=MODE"),
        (("--pin", "head=hold"), "unknown mode 'hold'; the modes are replicate, keep"),
        (("--pin", "head=keep", "--pin", "head=free"), "the modes keep and free; keep one of them"),
        (("--modes", "keep,hold"), "unknown mode 'hold'; the modes are"),
        (("--modes", ""), "unknown mode ''"),
        (("--precision", "fp8"), "invalid choice: 'fp8'"),
        (("--precision", "pure-bf"), "did you mean pure-bf16?"),
        (("--stage", "1", "--quiet"), "stage 1 needs the stages of a pipeline; give --pipeline too"),
        (("-o", "absent/plan.json"), "the folder of 'absent/plan.json' does not exist; create it"),
        (("-o", "."), "'.' is a folder; give the path of a file"),
        (("--cluster", "8xA999"), "'A999' is not in the catalogue"),
        (("--cluster", "0xA100-80GB"), "at least 1"),
        (("--cluster", "absent.toml"), "there is no such file"),
        (("--colour", "red"), "unrecognized arguments: --colour red; see osdp"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *arguments]) == 2
    _assert_one_sentence(capsys.readouterr(), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--",), "COMMAND; see osdp --help"),
        (("plane",), "invalid choice: 'plane'"),
        (("plan", "gpt-tiny"), "required: --cluster; see osdp plan --help"),
        (("plan", "gpt-tinny", "--cluster", "A100-80GB"), "did you mean gpt-tiny?"),
        (("graph", "absent.json"), "absent.json: there is no such file; give a plan file"),
    ],
)
def test_bad_commands_are_one_sentence(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    _assert_one_sentence(capsys.readouterr(), says)


def _assert_one_sentence(printed: tuple[str, str], says: str) -> None:
    out, err = printed
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("osdp: error: ")
    assert says in err


def test_the_exit_code_and_no_traceback_of_a_real_process() -> None:
    done = _osdp(*TINY, "--pin", "nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OsdpError("the solver gave up"), 1, "osdp: error: the solver gave up\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "osdp: error: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, "osdp: interrupted\n"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(plan_command, "_plan", fail)
    assert main(TINY) == code
    assert capsys.readouterr() == ("", says)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(plan_command, "_plan", fail)
    with pytest.raises(ZeroDivisionError):
        main(TINY)


@pytest.mark.parametrize("arguments", [("devices", "--json"), ("models",), ("plan", "--help")])
def test_a_reader_that_leaves_early_hears_no_complaint(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "osdp", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == ""


def test_a_terminal_without_unicode_still_gets_its_answer() -> None:
    done = _osdp("models", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert "gpt2-xl" in done.stdout


def test_a_document_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    write_json({"nodes": [1]}, path)
    assert json.loads(path.read_text()) == {"nodes": [1]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"nodes": [float("nan")]}, path)
    with pytest.raises(UsageError, match=r"cannot write .*; choose another path"):
        write_json({}, tmp_path / "absent" / "graph.json")
    assert json.loads(path.read_text()) == {"nodes": [1]}
    assert os.listdir(tmp_path) == ["graph.json"]


# ---- catalogues


def test_models_and_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["parameters"] for each in document["models"]} == {
        name: preset.parameters for name, preset in presets().items()
    }
    assert main(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["devices"] == [json.loads(json.dumps(each.to_dict())) for each in devices()]


# ---- progress


@dataclass(frozen=True)
class Seen:
    stage: str
    batch: int = 0
    done: int = 0
    total: int = 0
    best_samples_per_second: float = 0.0


def _lines(times: Sequence[float], reports: Sequence[Seen]) -> list[str]:
    lines: list[str] = []
    clock = iter(times)
    progress = PlainProgress(lines.append, clock=lambda: next(clock))
    for report in reports:
        progress(report)  # type: ignore[arg-type]
    return lines


def test_plain_progress_is_a_line_for_each_stage_and_one_now_and_then() -> None:
    searches = [Seen("search", batch, batch, 9, 2.5) for batch in (1, 2, 3)]
    lines = _lines([0.0, 1.0, 2.0, 6.5, 6.6], [Seen("capture"), *searches, Seen("baselines")])
    assert lines == [
        "tracing the model",
        "searching: batch size 1, best 2.5 samples/s (1 of 9)",
        "searching: batch size 3, best 2.5 samples/s (3 of 9)",
        "pricing DDP, ZeRO-2, FSDP and HSDP",
    ]


def test_an_unknown_stage_is_named_as_it_is() -> None:
    assert describe(Seen("polish")) == "polish"  # type: ignore[arg-type]


def test_a_terminal_sees_a_bar_and_stdout_stays_clean(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "osdp", *TINY, "--json"]
    with (tmp_path / "stdout").open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=follower, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed when the process is done
        while chunk := os.read(leader, 1 << 16):
            seen += chunk
    os.close(leader)
    assert process.wait(timeout=60) == 0
    Plan.from_dict(json.loads((tmp_path / "stdout").read_text()))
    assert b"tracing the model" in seen
