"""Functions as torch.compile writes them, without their kernels: for their memory, on fake tensors.

[Note: Partition]
torch.compile traces a function, makes one graph of its forward and backward, rewrites it and cuts it in two, so that
the forward graph puts out as few bytes as possible for the backward one. Then it fuses the operators of each, and
writes a Python function that allocates tensors, calls the fused kernels and drops each tensor after its last use. Here
the same code of torch does all that, and the functions run as they were written, with kernels that do nothing: no C++
compiler is needed. Where a graph cannot be written so, it runs operator by operator, which needs more memory in
between. Either runs inside of the autograd function that compiled code runs in, so what is saved is what that saves.
"""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from osdp._torch import FakeTensorMode, tree_leaves, tree_map_only, without_modes
from osdp._torch.check import missing_names
from osdp.errors import OsdpError

NEEDED: dict[str, tuple[str, ...]] = {
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    "torch._inductor.config": ("fx_graph_cache", "fx_graph_remote_cache", "patch"),
    "torch._inductor.cpu_vec_isa": ("valid_vec_isa_list",),
    "torch._inductor.graph.GraphLowering": ("_compile_to_module_lines",),
    "torch._functorch.config": ("enable_autograd_cache", "patch"),
    "torch.fx.graph": ("_BoxedCodeGen",),
}
"""As in osdp._torch.check; asked when a block is first traced so, because compilers take seconds to import."""


class Partition:
    """Calls functions as torch.compile writes them; see [Note: Partition]. Equal calls share what was written."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its imports
            missing = missing_names(NEEDED)
            if missing:
                raise OsdpError(f"torch {torch.__version__} has no {', '.join(missing)}")
            self._writer = _Writer(mode)
            code = _called.__code__.replace(co_name="called")  # of its own: torch counts graphs by code
            called = FunctionType(code, globals())
            self._call = torch.compile(called, backend=self._writer, fullgraph=True, dynamic=False)

    def prepare(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], more: Any) -> None:
        """Writes the function for such arguments, outside of all modes; `more` are tensors that may need gradients."""
        with without_modes(), self._writer.preparing():
            args, kwargs = self._fresh((tuple(args), kwargs))
            out = [t for t in _tensors(self._call(function, *args, **kwargs)) if t.requires_grad]
            needed = [t for t in (*_tensors((args, kwargs)), *more) if t.requires_grad]
            if out and needed:  # the backward graph is written when it is first run
                gradients = self._fresh([t.detach() for t in out])
                torch.autograd.grad(out, needed, gradients, allow_unused=True)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls what is prepared."""
        with torch.compiler.set_stance("fail_on_recompile"):
            return self._call(function, *args, **kwargs)

    def _fresh(self, tree: Any) -> Any:
        """Tensors like these with storages of their own: nothing that is counted outlives its use."""
        made: dict[int, Tensor] = {}

        def fresh(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                made[id(tensor)] = like.requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        with self._mode:
            return tree_map_only(Tensor, fresh, tree)


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Writer:
    """Torch's compiler, but for kernels."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._is_preparing = False
        self._compiler = importlib.import_module("torch._inductor.compile_fx")
        self._lowering = importlib.import_module("torch._inductor.graph").GraphLowering
        self._vectors: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
        self._caches = importlib.import_module("torch._functorch.config").patch
        self._settings = importlib.import_module("torch._inductor.config").patch

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return self._compiler.compile_fx(graph, inputs, inner_compile=self._compiled)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """In silence, and without caches on disk: what they have would take the place of what is written."""
        settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        was_disabled, stock = logging.root.manager.disable, self._vectors.valid_vec_isa_list
        with warnings.catch_warnings(), self._caches(enable_autograd_cache=False), self._settings(settings):
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            self._vectors.valid_vec_isa_list = list  # nobody asks a C++ compiler what it can do, or keeps the answer
            self._is_preparing = True
            try:
                yield
            finally:
                self._is_preparing = False
                self._vectors.valid_vec_isa_list = stock
                logging.disable(was_disabled)

    def _compiled(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        stock = self._lowering._compile_to_module_lines
        self._lowering._compile_to_module_lines = lambda lowering, code: self._loaded(lowering, code.value)
        try:
            return self._compiler.compile_fx_inner(copy.deepcopy(graph), inputs, **options)
        except Exception:
            return _by_operators(graph)
        finally:
            self._lowering._compile_to_module_lines = stock

    def _loaded(self, lowering: Any, code: str) -> ModuleType:
        """The module that was written, with kernels that do nothing."""
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", None, []
        module = ModuleType("written")
        module.__file__ = module.__name__
        names = vars(module)
        names.update({**lowering.constants, **lowering.torchbind_constants, "_kernels": _Kernels()})
        exec(compile(code.replace("= AsyncCompile()", "= _kernels"), module.__name__, "exec"), names)
        names |= {
            **dict.fromkeys(("assert_size_stride", "assert_alignment"), _nothing),
            "empty_strided_cpu": self._empty,
            "reinterpret_tensor": _reinterpreted,
        }
        return module

    def _empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._mode if self._is_preparing else nullcontext():
            return torch.empty_strided(shape, stride, dtype=dtype)


class _Kernels:
    """In place of what compiles kernels: those that it makes do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *source, **options: _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _reinterpreted(tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)


def _by_operators(graph: torch.fx.GraphModule) -> Any:
    """Runs a graph operator by operator; it takes its arguments as a list that it empties, as compiled code does."""
    graph.graph.set_codegen(importlib.import_module("torch.fx.graph")._BoxedCodeGen())
    graph.recompile()
    forward = graph.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
