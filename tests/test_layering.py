"""Claim: the layers are what docs/architecture.md says: who imports whom, and where torch and its private names are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "osdp"

ALLOWED = {
    "search": ("osdp.search",),
    "cluster": ("osdp.cluster", "osdp.engine", "osdp.errors", "osdp.files"),
    "cost": (
        *("osdp.cost", "osdp.search", "osdp.cluster", "osdp.model.graph", "osdp.model.kernels"),
        *("osdp.planfile", "osdp.plan_check", "osdp.recompute", "osdp.sharding", "osdp.engine", "osdp.errors"),
    ),
}
WITHOUT_TORCH = (
    "search",
    "cluster",
    "cost",
    "planfile.py",
    "sharding.py",
    "recompute.py",
    "engine.py",
    "batching.py",
    "baselines.py",
    "files.py",
)


def files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    found = [(path.name, module) for path in files(folder) for module in imported(path)]
    own = [(name, module) for name, module in found if within(module, ("osdp",))]
    assert own
    assert [each for each in own if not within(each[1], ALLOWED[folder])] == []


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_planning_does_without_torch(place: str) -> None:
    assert files(place)
    assert [path.name for path in files(place) for module in imported(path) if within(module, ("torch",))] == []


def test_private_modules_of_torch_are_imported_in_one_place() -> None:
    found = [
        (path.relative_to(ROOT).parts[0], module)
        for path in sorted(ROOT.rglob("*.py"))
        for module in imported(path)
        if within(module, ("torch",)) and any(part.startswith("_") for part in module.split("."))
    ]
    assert found and {place for place, _ in found} == {"_torch"}
