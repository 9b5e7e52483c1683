"""One meter for the memory of every way to train: what torch's allocator holds, live, with a limit that is real.

A small library (meter.c) is loaded before all others and counts what torch allocates. It sees what kernels allocate
inside and what lasts from building the model on, costs next to nothing, and so runs beside the clock. A request that
would pass the limit fails, and torch raises what it raises where memory is full.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_name("meter.c")


def library() -> Path:
    """The meter, compiled; once for each version of its source."""
    name = f"osdp-meter-{os.getuid()}-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    built = Path(tempfile.gettempdir()) / name
    if not built.exists():
        with tempfile.NamedTemporaryFile(dir=built.parent, suffix=".so", delete=False) as made:
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", made.name, str(_SOURCE), "-lpthread"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except FileNotFoundError:
                raise SystemExit("the memory meter needs a C compiler; install one, such as gcc") from None
        os.replace(made.name, built)
    return built


def environment() -> Mapping[str, str]:
    """What a process needs in order to be metered."""
    return {"LD_PRELOAD": str(library())}


class Meter:
    """Of this process, which was started with `environment()`; bytes above those at `begin` are counted."""

    def __init__(self) -> None:
        if str(library()) not in os.environ.get("LD_PRELOAD", ""):
            raise RuntimeError("this process is not metered; start it with the environment of meter.environment()")
        self._library = ctypes.CDLL(str(library()))
        for name in ("meter_level", "meter_peak"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.meter_limit.argtypes = [ctypes.c_size_t]
        self._floor = 0
        if not self._library.meter_begin():
            raise RuntimeError("torch is not loaded; import it before the meter is made")

    def begin(self) -> None:
        """What is held now is not counted from here on."""
        self._library.meter_reset()
        self._floor = self._library.meter_level()

    @property
    def level_bytes(self) -> int:
        return self._library.meter_level() - self._floor

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once since `begin`."""
        return self._library.meter_peak() - self._floor

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Allocations that would pass so many bytes above the floor fail inside."""
        self._library.meter_limit(self._floor + limit_bytes)
        try:
            yield
        finally:
            self._library.meter_limit(0)
