"""What a rank's tensors take at most: measured by the allocator on accelerators, by the system on CPUs."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

from osdp.accelerator import DeviceCalls

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The highest memory of this process since `begin`, above what it held then.

    On CPUs that is resident memory: it has, beside tensors, buffers of libraries and what the allocator keeps.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls = DeviceCalls(device)
        self._held = 0
        self.begin()

    def begin(self) -> None:
        if self._calls.has_streams:
            self._calls.forget_peak()
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # planning may have held more: forget its peak
        self._held = _resident("VmRSS")

    def peak_bytes(self) -> int:
        if self._calls.has_streams:
            return self._calls.peak_bytes()
        return max(0, _resident("VmHWM") - self._held)


def _resident(field: str) -> int:
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
