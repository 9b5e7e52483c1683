"""Which cases of many are for `make test`; the others, in which the same would fail again, are for `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def one_in(
    count: int,
    cases: Iterable[Any],
    *,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
    always: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Of each `count` cases the first one, and those that are wanted `always`; a tuple is a case's arguments."""
    found = []
    for index, case in enumerate(cases):
        marks = [] if index % count == 0 or always(case) else [pytest.mark.slow]
        name = None if ids is None else ids(case) if callable(ids) else ids[index]
        found.append(pytest.param(*(case if type(case) is tuple else (case,)), id=name, marks=marks))
    return found
