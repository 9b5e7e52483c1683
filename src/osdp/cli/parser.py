"""An argument parser that answers bad input as the rest of the program does: one sentence and the remedy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from osdp.cluster import parse_bytes
from osdp.cost.training import optimizer_cost
from osdp.errors import UsageError
from osdp.planfile import MOST_SAMPLES, MOST_TOKENS

T = TypeVar("T")
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")  # argparse's sentence
Commands = Any  # argparse's own type for subparsers is private


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
        # Before Python 3.14 only whole words such as -3 count as values, and `--memory -3GiB` lacks one.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    reads_config = False  # with `--config FILE`, values of the file replace the defaults; see osdp.cli.config

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.reads_config and args:
            from osdp.cli.config import apply_config

            apply_config(self, args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if (found := _CHOICE.search(message)) is not None:
            close = get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1)
            message += f"; did you mean {close[0]}?" if close else ""
        remedy = "" if ";" in message else f"; see {self.prog} --help"  # our own checks name theirs
        raise UsageError(message + remedy)


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` for argparse: its UsageError becomes a sentence about the argument."""

    def read_or_refuse(text: str) -> T:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_refuse


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name of `osdp models`, a config.json or its folder, ORG/NAME of the Hub, package.module:function",
    )


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number within limits, for argparse."""

    @checked
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{text[:40]!r} is not a whole number; give one of at least {least}") from None
        if number < least:
            raise UsageError(f"{number} is below {least}; give a whole number of at least {least}")
        if number > most:
            raise UsageError(f"{text[:40]} is above {most}; give a whole number of at most {most}")
        return number

    return read


positive = whole(1, (1 << 31) - 1)
samples = whole(1, MOST_SAMPLES)
tokens = whole(1, MOST_TOKENS)


@checked
def output_path(text: str) -> Path:
    """A path that can be written, so far as can be seen before the work is done."""
    path = Path(text)
    try:
        is_folder, in_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:
        raise UsageError(f"{text[:40]!r}... cannot be a path ({error.strerror}); give another one") from None
    if is_folder:
        raise UsageError(f"{text!r} is a folder; give the path of a file")
    if not in_folder:
        raise UsageError(f"the folder of {text!r} does not exist; create it or choose another path")
    return path


LEAST_BARE_BYTES = 1 << 20


@checked
def memory_size(text: str) -> int:
    """Bytes; a small number without a unit is one whose unit was forgotten."""
    size = parse_bytes(text)
    if size < LEAST_BARE_BYTES and text.strip()[-1].isdigit():
        raise UsageError(f"memory size {text!r} has no unit; write it as '{text.strip()}GiB'")
    return size


@checked
def toml_path(text: str) -> Path:
    path = output_path(text)
    if path.suffix != ".toml":
        raise UsageError(f"{text!r} does not end in .toml, by which `osdp plan` knows a cluster file; add it")
    return path


@checked
def read_optimizer(text: str) -> str:
    """One that a plan can run; others are refused with the reason."""
    return optimizer_cost(text).name
