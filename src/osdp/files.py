"""Files from outside: read whole or refused, decoded into declared types, written all or nothing.

[Note: Declared types]
What a file may hold is declared as a dataclass or a `msgspec.Struct`, with ranges in `msgspec.Meta`. `convert` decodes
plain tables into them. It refuses what the declaration does not allow with a sentence that gives the field, its value,
the limit and the remedy. Every number in a declaration has an upper bound: NaN, infinity and what 64 bits cannot hold
are refused with that.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import stat
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from osdp.errors import UsageError

MOST_BYTES = 64 << 20  # of a file of settings: a plan of 100,000 units has about 30 MB

T = TypeVar("T")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "null",
}
_LIMITS = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<length> of length)?(?: (?P<sign>[<>]=?) (?P<limit>\S+))?")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def open_regular(path: str | os.PathLike[str], *, remedy: str) -> BinaryIO:
    """A regular file, open; pipes, devices and folders are refused and never waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(path, os.fstat(descriptor), remedy=remedy)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_file(path: str | os.PathLike[str], *, remedy: str) -> bytes:
    """The bytes of a regular file of a sane size."""
    try:
        with open_regular(path, remedy=remedy) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise UsageError(f"{path}: it has {size:,} bytes, and at most {MOST_BYTES:,} are read; {remedy}")
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file; {remedy}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UsageError(f"{path!s:.200}: it cannot be read ({_reason(error)}); {remedy}") from None


def require_regular(path: str | os.PathLike[str], status: os.stat_result, *, remedy: str) -> None:
    """Refuses a folder, a pipe, a socket or a device: reading one may never end."""
    if stat.S_ISREG(status.st_mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    what = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    raise UsageError(f"{path}: it is {what} and not a file; {remedy}")


def read_json(path: str | os.PathLike[str], *, remedy: str) -> Any:
    """The plain values of a JSON file."""
    return _decoded(path, msgspec.json.decode, "JSON", remedy)


def read_toml(path: str | os.PathLike[str], *, remedy: str) -> Any:
    """The plain values of a TOML file."""
    return _decoded(path, msgspec.toml.decode, "TOML", remedy)


def _decoded(path: str | os.PathLike[str], decode: Any, form: str, remedy: str) -> Any:
    data = read_file(path, remedy=remedy)
    try:
        return decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of UTF-8 are ValueErrors
        raise UsageError(f"{path}: it is not valid {form} ({_reason(error)}); {remedy}") from None


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    write_bytes(text.encode("utf-8"), path)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Replaces the file in one step; whatever ends this leaves the old file or the new one, and nothing else."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; choose another path") from None
    finally:
        partial.unlink(missing_ok=True)


def write_json(document: Any, path: str | os.PathLike[str]) -> None:
    write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", path)


def convert(kind: type[T], table: Any, *, name: str, remedy: str, is_complete: bool = False) -> T:
    """A declared value from plain ones; see [Note: Declared types]. `name` is how an error calls the table.

    With `is_complete`, fields that have a default must be there too: osdp itself writes such a file.
    """
    try:
        value = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{_sentence(str(error), table, name)}; {remedy}") from None
    _refuse_unknown(table, msgspec.to_builtins(value), name, remedy)
    if is_complete:
        _refuse_missing(table, value, name, remedy)
    return value


def plain(value: Any) -> Any:
    """A declared value as the tables, lists, texts and numbers that JSON and TOML have."""
    return _with_lists(msgspec.to_builtins(value))


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


def check_fields(value: Any, *, remedy: str) -> None:
    """Holds a frozen dataclass that was made by hand to its declaration; whole numbers become floats where declared."""
    for name, kind in _declared(type(value)).items():
        given = getattr(value, name)
        plain = float(given) if isinstance(given, float) else given  # numpy has floats of its own
        try:
            object.__setattr__(value, name, msgspec.convert(plain, kind))
        except msgspec.ValidationError as error:
            raise UsageError(f"{_sentence(str(error), plain, name)}; {remedy}") from None


@functools.cache
def _declared(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _sentence(message: str, table: Any, name: str) -> str:
    """What msgspec found, in the words of this package: '`field` is `value` but must be `limit`'."""
    found, _, path = message.partition(" - at `")
    missing = re.fullmatch(r"Object missing required field `(.+)`", found)
    where, value = _look_up(table, path.rstrip("`").removeprefix("$"), name)
    if missing:
        return f"{where} has no field {missing[1]!r}"
    return f"{where} is {_short(value)} but must be {_limit(found)}"


def _limit(found: str) -> str:
    match = _EXPECTED.match(found)
    if match is None:
        return "a number that 64 bits can hold" if "out of range" in found else "one of the known values"
    what = " or ".join(_WORDS.get(kind, kind) for kind in match["kinds"].split(" | "))
    if match["sign"] is None:
        return what
    what = {"a text": "a text with a length", "a list": "a list with a length"}[what] if match["length"] else what
    return f"{what} {_LIMITS[match['sign']]} {match['limit'].removesuffix('.0')}"


def _look_up(table: Any, path: str, name: str) -> tuple[str, Any]:
    """The name and the value at a path such as `.units[1].modules`, as far as the path can be followed."""
    for key, index in _STEP.findall(path.partition("[...]")[0]):
        table = table[key] if key else table[int(index)]
        name = f"{name}.{key}" if key else f"{name}[{index}]"
    return name, table


def _refuse_unknown(given: Any, kept: Any, name: str, remedy: str) -> None:
    """Refuses a field that no declaration has: what was given is compared with what was kept of it."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            if key not in kept:
                close = difflib.get_close_matches(str(key), kept, n=1)
                hint = f"did you mean {close[0]!r}" if close else f"known fields are {', '.join(kept)}"
                raise UsageError(f"{name} has an unknown field {_short(key)}; {hint}; {remedy}")
            _refuse_unknown(value, kept[key], f"{name}.{key}", remedy)
    elif isinstance(given, Sequence) and isinstance(kept, Sequence) and not isinstance(given, str):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            _refuse_unknown(value, other, f"{name}[{index}]", remedy)


def _refuse_missing(given: Any, value: Any, name: str, remedy: str) -> None:
    """Refuses a table that lacks a field of its declaration: its default would be taken without a word."""
    if isinstance(given, Mapping) and is_dataclass(value):
        for each in fields(value):
            if each.name not in given:
                raise UsageError(f"{name} has no field {each.name!r}; {remedy}")
            _refuse_missing(given[each.name], getattr(value, each.name), f"{name}.{each.name}", remedy)
    elif isinstance(given, Sequence) and isinstance(value, tuple):
        for index, (one, other) in enumerate(zip(given, value, strict=True)):
            _refuse_missing(one, other, f"{name}[{index}]", remedy)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits is not printed
        return "a number of thousands of digits"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
