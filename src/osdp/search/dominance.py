"""Which rows of a table no other row is as good as in every column; less is better."""

from __future__ import annotations

import numpy as np

from osdp.search.problem import FloatArray, IntArray

_FIRST = 3  # columns that are compared for all pairs: few pairs pass these
_ROWS = 256  # at a time
_PAIRS = 20_000  # at a time


def undominated(table: FloatArray) -> IntArray:
    """The rows that are left; of equal ones the first."""
    if not table.shape[1]:
        return np.zeros(1, np.int64)
    order = np.lexsort(table.T[::-1])  # a row is beaten only by one before it
    table = table[order]
    kept, found = table[:0], []
    for at in range(0, len(table), _ROWS):
        rows = table[at : at + _ROWS]
        alive = np.nonzero(~_beaten(rows, kept, before=False))[0]
        alive = alive[~_beaten(rows[alive], rows[alive], before=True)]
        found.append(at + alive)
        kept = np.concatenate([kept, rows[alive]])
    return order[np.concatenate(found)]


def _beaten(rows: FloatArray, rivals: FloatArray, *, before: bool) -> np.ndarray:
    """Whether one of the rivals is no worse than a row in all columns; `before`: one of those before it."""
    pairs = np.ones((len(rows), len(rivals)), bool)
    if before:
        pairs = np.tril(pairs, -1)
    for column in range(min(_FIRST, rows.shape[1])):
        pairs &= rivals[None, :, column] <= rows[:, None, column]
    row, rival = np.nonzero(pairs)
    beaten = np.zeros(len(rows), bool)
    for at in range(0, len(row), _PAIRS):
        some, other = row[at : at + _PAIRS], rival[at : at + _PAIRS]
        beaten[some[np.all(rivals[other] <= rows[some], axis=1)]] = True
    return beaten
