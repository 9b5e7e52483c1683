"""The search of the paper's released code, written anew: a table over whole megabytes, in Python.

Every layer has one time and one number of megabytes for each option, and both just add up. The released code keeps a
cell for each number of megabytes and each option of the latest layer, in an array of numpy (`by_option`). One cell for
each number of megabytes says the same (`lean`): it is here to show what of the time is the idea and what the writing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

INFINITY = float("inf")
Item = Sequence[tuple[float, int]]  # one layer: seconds and megabytes of each option


def by_option(items: Sequence[Item], megabytes: int) -> list[int] | None:
    """The options with the least seconds in so many megabytes, layer by layer; None where none fit."""
    most = max(len(item) for item in items)
    before = np.zeros((megabytes + 1, 1))
    came_from = []
    for item in items:
        now = np.full((megabytes + 1, most), INFINITY)
        origin = np.full((megabytes + 1, most), -1)
        for used in range(megabytes + 1):
            for option, (seconds, need) in enumerate(item):
                if need <= used:
                    cells = before[used - need] + seconds
                    best = np.argmin(cells)
                    now[used, option] = cells[best]
                    origin[used, option] = best
        came_from.append(origin)
        before = now
    option = int(np.argmin(before[megabytes]))
    if before[megabytes, option] == INFINITY:
        return None
    chosen, left = [], megabytes
    for item, origin in zip(reversed(items), reversed(came_from), strict=True):
        chosen.append(option)
        option, left = int(origin[left, option]), left - item[option][1]
    return chosen[::-1]


def lean(items: Sequence[Item], megabytes: int) -> list[int] | None:
    """The same with one cell for each number of megabytes, in lists."""
    before = [0.0] * (megabytes + 1)
    took = []
    for item in items:
        now = [INFINITY] * (megabytes + 1)
        taken = [-1] * (megabytes + 1)
        for option, (seconds, need) in enumerate(item):
            for used in range(need, megabytes + 1):
                cell = before[used - need] + seconds
                if cell < now[used]:
                    now[used] = cell
                    taken[used] = option
        took.append(taken)
        before = now
    return None if before[megabytes] == INFINITY else _read_back(items, took, megabytes)


def vectorised(items: Sequence[Item], megabytes: int) -> list[int] | None:
    """The same as `lean`, all numbers of megabytes of a layer at once."""
    before = np.zeros(megabytes + 1)
    took = []
    for item in items:
        now = np.full(megabytes + 1, INFINITY)
        taken = np.full(megabytes + 1, -1)
        for option, (seconds, need) in enumerate(item):
            cells = np.full(megabytes + 1, INFINITY)
            if need <= megabytes:
                cells[need:] = before[: megabytes + 1 - need] + seconds
            better = cells < now
            now[better], taken[better] = cells[better], option
        took.append(taken)
        before = now
    return None if before[megabytes] == INFINITY else _read_back(items, took, megabytes)


def _read_back(items: Sequence[Item], took: Sequence[Sequence[int]], megabytes: int) -> list[int]:
    """The option of every layer, from what the last one took to the first."""
    chosen, left = [], megabytes
    for item, taken in zip(reversed(items), reversed(took), strict=True):
        option = int(taken[left])
        chosen.append(option)
        left -= item[option][1]
    return chosen[::-1]
