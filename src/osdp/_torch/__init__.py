"""The only place that imports torch's underscored modules: what breaks with a new torch breaks here.

`fsdp` is a module of its own, because planning does without it and it takes half a second to load.
"""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def fake_store() -> Any:
    """The store of a fake process group; imported when it is needed, as torch's test modules take a second to load."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "fake_store", "tree_leaves", "tree_map_only"]
