"""A case, and what generators of cases share: hostile values, odd files, and places in tables."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400),
    *(0.5, -0.5, 1e-320, 1e300, math.nan, math.inf, -math.inf),
    *("", "²", "0", "-1", "nan", "free", "\0", "a" * 100_000, "\ud83d", "../../etc/passwd", "{}"),
    *([], {}, [[]], [None], {"": None}, [0] * 1000),
)
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Case:
    """A command to run, with files that are written already.

    Nonsense must be refused with code 2, what is good must be done; of the rest nobody knows.
    """

    what: str
    argv: tuple[str, ...]
    nonsense: bool = False
    good: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def places(table: Any, place: Place = ()) -> Iterator[Place]:
    """Every place in nested tables and lists."""
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places(value, (*place, key))


def at(table: Any, place: Place) -> Any:
    for key in place:
        table = table[key]
    return table


def put(table: Any, place: Place, value: Any) -> None:
    at(table, place[:-1])[place[-1]] = value


def kind_of(value: Any) -> str:
    """The type in the words of JSON, where 1 and 1.0 are numbers, and true is not."""
    if isinstance(value, bool) or value is None:
        return str(value)
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def dumped(document: Any) -> bytes:
    """JSON as a careless program writes it: NaN, infinity and lone surrogates included."""
    return json.dumps(document).encode()


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed: digits for other digits, which often leaves a good file, or anything for anything."""
    changed = bytearray(data)
    digits = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    for _ in range(chance.choice((1, 1, 2, 8))):
        if digits and chance.random() < 0.8:
            changed[chance.choice(digits)] = chance.choice(b"0123456789")
        else:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def odd_file(path: Path, good: bytes, chance: random.Random) -> str:
    """Puts something at a path that no program should take for the good file; says what."""
    data = {
        "empty": b"",
        "cut short": good[: chance.randrange(1, max(2, len(good.rstrip()) // 2))],
        "binary": b"\xff\xfe\x00\x01" + os.urandom(64),
        "UTF-16": good.decode().encode("utf-16"),
        "nested deeply": b"[" * 200_000,
        "another form": b"\x00" + good,
    }
    what = chance.choice(("pipe", "folder", "device", "absent", "link to itself", "too large", *data))
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to(chance.choice(("/dev/zero", "/dev/null", "/dev/urandom", "/dev/full")))
    elif what == "link to itself":
        path.symlink_to(path)
    elif what == "too large":
        with path.open("wb") as file:
            file.write(good)
            file.truncate(1 << 40)
    elif what in data:
        path.write_bytes(data[what])
    return what
