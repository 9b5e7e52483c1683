"""The only place that imports torch's underscored modules: what breaks with a new torch breaks here.

`fsdp` is a module of its own, because planning does without it and it takes half a second to load.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShape
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map_only


def default_timeout() -> timedelta | None:
    """The time-out that the user gave the process group; new groups would take torch's own of half an hour."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(group._device_types[0])  # of NCCL alone there is none for the CPU
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", None)


def default_store() -> dist.Store:
    """What the ranks of the process group met at."""
    return dist.distributed_c10d._get_default_store()


def fake_store() -> Any:
    """The store of a fake process group; imported when it is needed, as torch's test modules take a second to load."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


__all__ = [
    "DataDependentOutput",
    "DynamicOutputShape",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "default_store",
    "default_timeout",
    "fake_store",
    "tree_leaves",
    "tree_map_only",
    "without_fake_mode",
    "without_modes",
]
