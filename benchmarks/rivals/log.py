"""What was found in a setting so far: a file of JSON lines that only grows, so that a run goes on where another ended.

Rank 0 prints a line for everything that is found, and the process that started the ranks appends it. Every rank reads
the file when it starts and adds what it finds itself: all ranks find the same, and so take the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Log:
    """Lines of one setting; `tell` is given those that are new."""

    def __init__(self, lines: list[Line], tell: Callable[[Line], None] = lambda line: None) -> None:
        self.lines, self._tell = lines, tell

    @staticmethod
    def read(file: Path, tell: Callable[[Line], None] = lambda line: None) -> Log:
        """A last line that is cut off, because a run was killed, is left out."""
        text = file.read_text() if file.exists() else ""
        return Log([json.loads(line) for line in text.splitlines() if line.endswith("}")], tell)

    def add(self, what: str, **figures: Any) -> None:
        line = json.loads(json.dumps({"what": what, **figures}))  # as it will be read
        self.lines.append(line)
        self._tell(line)

    def all(self, what: str, **fields: Any) -> list[Line]:
        """Lines of a kind whose fields are these, in order."""
        wanted = json.loads(json.dumps(fields))
        return [line for line in self.lines if line["what"] == what and _has(line, wanted)]

    def last(self, what: str, **fields: Any) -> Line | None:
        found = self.all(what, **fields)
        return found[-1] if found else None


def _has(line: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(line.get(key) == value for key, value in fields.items())
