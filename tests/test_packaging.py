"""What is released is whole: wheel and source distribution build without a network, have the data files and the
metadata, and the command of the installed wheel answers. What it needs to run is pinned with hashes."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import osdp

ROOT = Path(__file__).parents[1]
DATA = ("osdp/py.typed", "osdp/cluster/devices.toml", "osdp/model/presets.toml", "osdp/training/text/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "osdp"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = files.stdout.split("\0") if files.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in names:  # a copy: building writes beside the sources
        if name.startswith(("src/", "README", "LICENSE", "pyproject")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_and_sdist_hold_the_package_and_its_data(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= set(names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in modules} <= inside and {"README.md", "LICENSE", "pyproject.toml"} <= inside
    for data in DATA:
        assert any(name.startswith(data) for name in names) and any(name.startswith(f"src/{data}") for name in inside)
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)


def test_the_metadata_says_what_the_package_is(built: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(built[0])
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(archive.read(name).decode())
    assert metadata["Name"] == "osdp-torch" and metadata["Version"] == osdp.__version__ == "0.3.0"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    needs = metadata.get_all("Requires-Dist")
    assert "torch<2.14,>=2.13" in needs and any("accelerate" in each and "extra" in each for each in needs)
    assert {"hf", "accelerate", "trl", "lightning", "torchtitan"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload().startswith("# osdp")


def needed(name: str) -> set[str]:
    """A distribution of this environment and all that its metadata asks for, without extras."""
    found, left = set(), {canonicalize_name(name)}
    while left:
        found.add(each := left.pop())
        asked = [Requirement(text) for text in importlib.metadata.requires(each) or ()]
        left |= {canonicalize_name(r.name) for r in asked if not r.marker or r.marker.evaluate({"extra": ""})} - found
    return found


def empty_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel and what its metadata asks for, linked from here, as there is no network."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in needed("osdp-torch") - {"osdp-torch"}:
        for file in importlib.metadata.files(name) or ():
            top = site / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0])
    return python


def test_the_command_answers_where_nothing_is_installed_but_what_is_declared(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python = empty_environment(tmp_path / "empty", built[0])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def printed(*command: str) -> str:
        ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    osdp_command = str(python.with_name("osdp"))
    assert "usage: osdp" in printed(osdp_command, "--help") and "gpt-tiny" in printed(osdp_command, "models")
    assert "samples/s" in printed(osdp_command, "plan", "gpt-tiny", "--cluster", "8xL4", "--batch", "1")
    where, version = printed(str(python), "-c", "import osdp; print(osdp.__file__, osdp.__version__)").split()
    assert Path(where).is_relative_to(tmp_path / "empty") and version == osdp.__version__


def test_the_hashed_list_has_the_pinned_versions_of_all_that_is_needed_to_run() -> None:
    lines = [line for line in (ROOT / "requirements-hashed.txt").read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"(\S+)==([^\s+]+)\S* --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    hashed = {match[1]: match[2] for match in found if match}
    assert len(hashed) == len(lines)
    pinned = re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text().lower())
    assert set(hashed.items()) <= {(name.replace("_", "-"), version) for name, version in pinned}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[<>=]", each)[0] for each in needed} <= set(hashed)
