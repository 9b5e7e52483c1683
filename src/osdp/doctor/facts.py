"""What there is: versions, this rank's device, and the settings that change how it runs."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch
import torch.distributed as dist

import osdp
from osdp.accelerator import DeviceCalls, backends_for
from osdp.training.world import World

_SETTINGS = ("CUDA_", "NCCL_", "PYTORCH_", "TORCH_", "OMP_NUM_THREADS", "GLOO_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def versions() -> dict[str, str]:
    found = {"osdp": osdp.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    found["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def of_rank(world: World) -> dict[str, Any]:
    """This rank's place and device; only settings of the libraries, and none that may be secret."""
    calls = DeviceCalls(world.device)
    found: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "device": str(world.device),
        "name": calls.name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices_seen": torch.accelerator.device_count(),
        "backends": backends_for(world.device),
        "settings": {key: value for key, value in sorted(os.environ.items()) if _is_setting(key)},
    }
    if calls.has_streams:
        free, total = calls.free_and_total_bytes()
        found |= {"memory_bytes": total, "free_bytes": free}
    return found


def _is_setting(key: str) -> bool:
    return key.startswith(_SETTINGS) and not any(word in key.upper() for word in _SECRET)
