"""The only place that imports torch's underscored modules: what breaks with a new torch breaks here."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["FakeStore", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "tree_map_only"]
