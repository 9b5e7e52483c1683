"""Equal things together: 47 blocks with the same choices are one row, 'blocks.0 … blocks.46 (47)'."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def below(name: str, parent: str) -> str:
    """A module's name as seen from `parent`; '' for the parent itself."""
    if not parent:
        return name
    return name.removeprefix(parent).removeprefix(".") if f"{name}.".startswith(f"{parent}.") else name


def merged(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, in the order in which each key first appears.

    Equal blocks need not be neighbours: a search is free to alternate, and 48 rows of two kinds say less than two.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def label_of(names: Sequence[str]) -> str:
    """One label for numbered siblings, counting up or down: 'h.3', 'h.0 … h.46 (47)', 'h.3 … h.0, h.8 (5)'."""
    if len(names) == 1:
        return names[0]
    runs: list[list[str]] = []
    for name in names:
        if runs and _continues(runs[-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return f"{', '.join(_run_label(run) for run in runs)} ({len(names)})"


def _run_label(run: list[str]) -> str:
    return ", ".join(run) if len(run) < 3 else f"{run[0]} … {run[-1]}"


def _continues(run: list[str], name: str) -> bool:
    """Whether the name is the next number, up or down; names do not repeat, so that a run has one direction."""
    last, following = _numbered(run[-1]), _numbered(name)
    return last is not None and following is not None and (last[0], 1) == (following[0], abs(following[1] - last[1]))


def _numbered(name: str) -> tuple[str, int] | None:
    parent, _, last = name.rpartition(".")
    return (parent, int(last)) if last.isdecimal() else None
