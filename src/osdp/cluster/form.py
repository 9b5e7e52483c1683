"""Reading tables that people write: every key known, every type right, every error with its remedy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from osdp.cluster.sizes import parse_bytes
from osdp.errors import UsageError

_MISSING: Any = object()


class Form:
    """One table while it is read: keys are taken by type, and what is left over is unknown.

    `place` is how an error names the table: '' for the top, '[device]' for a nested one.
    """

    def __init__(self, table: object, place: str, known: tuple[str, ...]) -> None:
        self.place = f" in {place}" if place else ""
        if not isinstance(table, Mapping):
            raise UsageError(f"{place or 'the cluster'} is {table!r} but must be a table of {', '.join(known)}")
        self.table: dict[str, Any] = dict(table)
        for key in self.table:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean '{close[0]}'" if close else f"known keys are {', '.join(known)}"
                raise UsageError(f"unknown key '{key}'{self.place}; {hint}")

    def has(self, key: str) -> bool:
        return key in self.table

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        if key in self.table:
            return self.table[key]
        if default is _MISSING:
            raise UsageError(f"key '{key}'{self.place} is missing; add it")
        return default

    def _typed(self, key: str, default: Any, types: tuple[type, ...], words: str) -> Any:
        value = self.raw(key, default)
        given = key in self.table
        if given and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise UsageError(f"key '{key}'{self.place} is {value!r} but must be {words}; correct it")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        return self._typed(key, default, (str,), "a text in quotes")

    def whole(self, key: str, default: Any = _MISSING) -> int:
        return self._typed(key, default, (int,), "a whole number")

    def number(self, key: str, default: Any = _MISSING) -> float:
        return self._typed(key, default, (int, float), "a number")

    def truth(self, key: str, default: Any = _MISSING) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def fraction(self, key: str, default: Any = _MISSING) -> float:
        return float(self._typed(key, default, (bool, int, float), "true, false or a number from 0 to 1"))

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self._typed(key, _MISSING, (list, tuple), "a list of numbers")
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
            raise UsageError(f"key '{key}'{self.place} is {values!r} but must be a list of numbers; correct it")
        return tuple(values)

    def size(self, default: Any = _MISSING) -> Any:
        """The memory: `memory = '40GiB'` as people write it or `memory_bytes` as programs do, not both."""
        if self.has("memory") and self.has("memory_bytes"):
            raise UsageError(f"both 'memory' and 'memory_bytes' are given{self.place}; keep one of them")
        if self.has("memory"):
            return parse_bytes(self.raw("memory"))
        return self.whole("memory_bytes", default)
