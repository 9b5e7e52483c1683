"""Optimal sharded data parallel training on FSDP2: plan a model for a cluster, then run it as planned.

    plan = osdp.plan(model, example_inputs, "8xA100-80GB")
    osdp.parallelize(model, plan)

Names are loaded when they are first used, so that importing the package, and `osdp --help`, are immediate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osdp.accelerator import start
    from osdp.api import plan
    from osdp.cluster import Cluster
    from osdp.errors import DoesNotFit, OsdpError, UsageError
    from osdp.planfile import Plan
    from osdp.runtime.accumulate import accumulate
    from osdp.runtime.apply import parallelize
    from osdp.runtime.checkpoint import load_checkpoint, save_checkpoint
    from osdp.runtime.clip import clip_grad_norm_
    from osdp.runtime.initialize import initialize
    from osdp.runtime.weights import load_pretrained
    from osdp.runtime.weights_out import save_pretrained

__version__ = "0.3.0"

__all__ = [
    "Cluster",
    "DoesNotFit",
    "OsdpError",
    "Plan",
    "UsageError",
    "__version__",
    "accumulate",
    "clip_grad_norm_",
    "initialize",
    "load_checkpoint",
    "load_pretrained",
    "parallelize",
    "plan",
    "save_checkpoint",
    "save_pretrained",
    "start",
]

_HOME = {
    "Cluster": "osdp.cluster",
    "DoesNotFit": "osdp.errors",
    "OsdpError": "osdp.errors",
    "Plan": "osdp.planfile",
    "UsageError": "osdp.errors",
    "accumulate": "osdp.runtime.accumulate",
    "clip_grad_norm_": "osdp.runtime.clip",
    "initialize": "osdp.runtime.initialize",
    "load_checkpoint": "osdp.runtime.checkpoint",
    "load_pretrained": "osdp.runtime.weights",
    "parallelize": "osdp.runtime.apply",
    "plan": "osdp.api",
    "save_checkpoint": "osdp.runtime.checkpoint",
    "save_pretrained": "osdp.runtime.weights_out",
    "start": "osdp.accelerator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'osdp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
