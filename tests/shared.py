"""What one test process has made for all: a capture takes a second or two, and many files want the same ones."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FOLDER = "OSDP_TESTS_SHARED"  # set by conftest.py, for this run of the tests alone

Made = TypeVar("Made")


def _word(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def made_once(function: Callable[..., Made]) -> Callable[..., Made]:
    """`functools.cache` over all processes of a run; arguments are words, numbers and classes."""

    @functools.cache
    def found(*args: Any, **kwargs: Any) -> Made:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return function(*args, **kwargs)
        words = [_word(function), *map(_word, args), *(f"{name}={_word(value)}" for name, value in kwargs.items())]
        file = Path(folder) / hashlib.sha256(" ".join(words).encode()).hexdigest()
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if file.exists():
                return pickle.loads(file.read_bytes())
            made = function(*args, **kwargs)
            file.write_bytes(pickle.dumps(made))
            return made

    return found
