"""A configuration file in place of options: TOML with an option's long name for each key.

The file's values replace the defaults, so that what stands on the command line wins.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from osdp.errors import UsageError
from osdp.files import read_toml

OPTION = "--config"
REMEDY = "give a TOML file with lines such as steps = 1000"
_POSITIONAL = "model"


def apply_config(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Makes the values of the file that `--config` names the parser's defaults."""
    path = _path(args)
    if path is None:
        return
    table = read_toml(path, remedy=REMEDY)
    if not isinstance(table, dict):
        raise UsageError(f"{path} is not a table; {REMEDY}")
    known = {
        action.option_strings[-1].removeprefix("--"): action for action in parser._actions if action.option_strings
    }
    known[_POSITIONAL] = next(action for action in parser._actions if action.dest == _POSITIONAL)
    for key in ("help", OPTION.removeprefix("--")):
        known.pop(key, None)
    for key, value in table.items():
        action = known.get(str(key).replace("_", "-"))
        if action is None:
            close = difflib.get_close_matches(str(key).replace("_", "-"), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "its keys are the long names of options"
            raise UsageError(f"{path}: {key!r} is not an option; {hint}")
        parser.set_defaults(**{action.dest: _value(action, key, value, path)})
        if action.dest == _POSITIONAL:
            action.nargs = "?"  # may now be left out
        action.required = False


def _path(args: Sequence[str]) -> str | None:
    for place, word in enumerate(args):
        if word == OPTION and place + 1 < len(args):
            return args[place + 1]
        if word.startswith(f"{OPTION}="):
            return word.partition("=")[2]
    return None


def _value(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    """A value as the option itself would have read it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{path}: {key} is {value!r:.40} and must be true or false")
        return value
    several = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if several:
        return [_one(action, key, each, path) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        value = ",".join(str(each) for each in value)  # as --modes has it
    return _one(action, key, value, path)


def _one(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    if isinstance(value, (bool, dict, list)):
        raise UsageError(f"{path}: {key} is {value!r:.40} and must be a number or a text")
    try:
        read = action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{path}: {key}: {error}") from None
    if action.choices is not None and read not in action.choices:
        raise UsageError(f"{path}: {key} is {read!r} and must be one of {', '.join(map(str, action.choices))}")
    return read
