"""Runs one training step on fake tensors and writes down every kernel; see [Note: Trace] in graph.py."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from osdp._torch import TorchDispatchMode, tree_leaves, tree_map_only
from osdp.model.graph import Mark
from osdp.model.held_dtype import HeldDtypes
from osdp.model.inputs import CaptureError, map_tensors
from osdp.model.kernels import attention_workspace, kernel_kind, product_workspace, transposed_depth
from osdp.model.measured_space import Kernel, kernel_of
from osdp.model.pace import KERNELS, Pace
from osdp.model.parameter_uses import ParameterUses
from osdp.model.selective import checkpointed
from osdp.planfile import Granularity
from osdp.recompute import Recompute

_DEVICE = torch.ops.prim.device.default


@dataclass
class RawTrace:
    """One capture: a row a kernel, and the marks with the kernel that they precede."""

    flops: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)  # see [Note: Workspaces] in kernels.py
    depths: list[int] = field(default_factory=list)  # of products whose first matrix is transposed, see the same note
    to_measure: dict[int, Kernel] = field(default_factory=dict)  # see [Note: Measured space] in measured_space.py
    live: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    mark_kernel: list[int] = field(default_factory=list)
    mark_live: list[int] = field(default_factory=list)
    cast_live: list[int] = field(default_factory=list)  # at a mark, once what the unit is given is cast
    backward_mark: int = 0  # marks from here on belong to the backward pass
    saved: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    on_host: dict[str, int] = field(default_factory=dict)  # of blocks whose input is there
    end_live: int = 0
    assumptions: list[str] = field(default_factory=list)
    used_outside: dict[str, str] = field(default_factory=dict)  # see [Note: Used outside] in parameter_uses.py
    differs: set[Granularity] = field(default_factory=set)  # see [Note: Held dtype] in held_dtype.py


class SeesKernels(Protocol):
    """Sees every kernel, and may carry something in its counts; see [Note: Two batches] in two_batches.py."""

    def seen(self, func: Any, tensors: Iterable[Tensor], counts: tuple[int, ...]) -> tuple[int, ...]: ...


class Recorder(TorchDispatchMode):
    """Counts FLOPs, bytes moved and bytes alive, kernel by kernel. Storages in `outside` do not count."""

    def __init__(
        self,
        outside: set[int],
        pace: Pace | None = None,
        kernels: SeesKernels | None = None,
        *,
        measures: bool = False,
    ) -> None:
        super().__init__()
        self._measures = measures
        self.trace = RawTrace()
        self._kernels = kernels
        self._pace = pace
        self.live = 0
        self.outside = outside
        self.uses: ParameterUses | None = None
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._born: dict[int, int] = {}  # storage -> the kernel that allocated it
        self._is_listing = True

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP2 frees and allocates by resizing storages, which is no kernel: follow it too."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            entry = self._alive.get(storage._cdata)
            result = resize(storage, size)
            if entry is not None:
                self._alive[storage._cdata] = (entry[0], storage.nbytes())
                self.live += storage.nbytes() - entry[1]
                if storage.nbytes() > entry[1]:
                    self._point(0, 0)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Counts tensors that exist before the recording."""
        for tensor in tensors:
            self._hold(tensor)

    @contextmanager
    def unlisted(self) -> Iterator[None]:
        """What runs here allocates and is no kernel of the model."""
        self._is_listing = False
        try:
            yield
        finally:
            self._is_listing = True

    def mark(self, kind: str, name: str, recomputed: bool = False) -> None:
        self.trace.marks.append(Mark(kind, name, recomputed))
        self.trace.mark_kernel.append(len(self.trace.live))
        self.trace.mark_live.append(self.live)
        self.trace.cast_live.append(self.live)

    def cast(self) -> None:
        """The unit that was just entered has cast what it is given: FSDP2 gathers it only then."""
        self.trace.cast_live[-1] = self.live

    def _freed(self, key: int, _: object) -> None:
        entry = self._alive.pop(key, None)
        if entry is not None:
            self.live -= entry[1]

    def _hold(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor):  # a wrapper of the global shape; what is allocated is its local tensor
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self.outside:
            return False
        nbytes = storage.nbytes()
        self._alive[key] = (weakref.ref(storage, functools.partial(self._freed, key)), nbytes)
        self._born[key] = len(self.trace.live)
        self.live += nbytes
        return True

    def hand_over(self, name: str, gradient: Tensor) -> None:
        """Takes a parameter's complete gradient out of the activations, from the kernel that allocated it on.

        The plan accounts for gradients: the mark says from where.
        """
        storage = gradient.untyped_storage()
        entry = self._alive.pop(storage._cdata, None)
        if entry is None:
            self.mark("gradient", name)
            return
        trace, born, nbytes = self.trace, self._born[storage._cdata], entry[1]
        self.live -= nbytes
        for kernel in range(born, len(trace.live)):
            trace.live[kernel] -= nbytes
        place = len(trace.marks)
        while place and trace.mark_kernel[place - 1] > born:
            place -= 1
            trace.mark_live[place] -= nbytes
            trace.cast_live[place] -= nbytes
        trace.marks.insert(place, Mark("gradient", name))
        trace.mark_kernel.insert(place, born)
        trace.mark_live.insert(place, trace.live[born])
        trace.cast_live.insert(place, trace.live[born])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it costs as much as the recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and hasattr(args[0], "fake_device"):  # two calls of three: answered here, it takes no time
            return args[0].fake_device
        kwargs = kwargs or {}
        if self.uses is not None:
            self.uses.seen(func, args)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in outputs if self._hold(tensor)]
        if not self._is_listing or (not fresh and not func._schema.is_mutable):
            return out  # a view moves nothing
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else _unlisted_flops(func, args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._overloadpacket is torch.ops.aten.embedding:
            inputs = [*inputs[1:], *outputs]  # reads the rows that it puts out, not the whole table
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        counts = (int(flops), moved, *self._workspace(func, args))
        if self._kernels is not None:
            counts = self._seen(func, (*inputs, *outputs), counts, fresh)
        self._point(counts[0], counts[1], kernel_kind(func, args, kwargs, int(flops)), *counts[2:])
        if self._measures and (kernel := kernel_of(func, args, int(flops))) is not None:
            self._works(kernel)
        return out

    def _works(self, kernel: Kernel) -> None:
        """The last kernel works in space that is to be measured."""
        self.trace.to_measure[len(self.trace.live) - 1] = kernel

    def _seen(
        self, func: Any, tensors: Sequence[Tensor], counts: tuple[int, ...], fresh: Sequence[Tensor]
    ) -> tuple[int, ...]:
        """The kernel's counts with what they carry, and the bytes of what it allocated with theirs."""
        assert self._kernels is not None
        keys = [tensor.untyped_storage()._cdata for tensor in fresh]
        sizes = [self._alive[key][1] for key in keys]
        found = self._kernels.seen(func, tensors, (*counts, *sizes))
        for key, before, size in zip(keys, sizes, found[len(counts) :], strict=True):
            self._alive[key] = (self._alive[key][0], size)
            self.live += size - before
        return found[: len(counts)]

    def _workspace(self, func: Any, args: Sequence[Any]) -> tuple[int, int]:
        """The working space, and the depth of a product that may need more than that."""
        return product_workspace(func, args) + attention_workspace(func, args), transposed_depth(func, args)

    def _point(self, flops: int, moved: int, kind: int = 0, workspace: int = 0, depth: int = 0) -> None:
        self.trace.flops.append(flops)
        self.trace.moved.append(moved)
        self.trace.kinds.append(kind)
        self.trace.workspaces.append(workspace)
        self.trace.depths.append(depth)
        self.trace.live.append(self.live)
        if self._pace is not None and len(self.trace.live) % KERNELS == 0:
            self._pace.tick()


def _unlisted_flops(func: Any, args: Sequence[Any]) -> int:
    """Kernels that torch's own counter does not know: grouped products, and the CPU's fused attention.

    Attention takes two products in forward and five in backward.
    """
    name = func._overloadpacket._qualified_op_name if hasattr(func, "_overloadpacket") else ""
    if name == "aten::_grouped_mm":
        first, second = args[0], args[1]
        # rows times columns times depth, once: every row meets one group only
        if first.dim() == 2 and second.dim() == 2:  # the weight gradient: groups lie along the depth
            return 2 * first.shape[0] * first.shape[1] * second.shape[1]
        return 2 * first.shape[-2] * first.shape[-1] * second.shape[-1] * (first.shape[0] if first.dim() == 3 else 1)
    if not name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, length, width = query.shape
    products = batch * heads * length * key.shape[-2] * 2
    if backward:
        return products * (3 * width + 2 * value.shape[-1])
    return products * (width + value.shape[-1])


class _TracedHost:
    """What osdp.model.input_on_host needs of a host, in a trace: memory there is none of the device's."""

    def __init__(self, recorder: Recorder, block: str) -> None:
        self._recorder, self._block = recorder, block

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._recorder.trace.on_host[self._block] = tensor.numel() * tensor.element_size()
        with self._recorder.unlisted():
            stride = torch.empty_like(tensor).stride()
        return functools.partial(torch.empty_strided, tensor.size(), stride, dtype=tensor.dtype, device=tensor.device)

    def get(self, held: Callable[[], Tensor]) -> Tensor:
        with self._recorder.unlisted():
            return held()


class _LeaveBackward(torch.autograd.Function):
    """The identity; its backward runs when the module's input gradients are known, as FSDP2's own hook does."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.callback()
        return (None, *grads)


class Hooks:
    """Marks the entering and leaving of modules, forward and backward, and each complete gradient."""

    def __init__(self, recorder: Recorder, watched: Mapping[str, nn.Module]) -> None:
        self.recorder = recorder
        self.in_backward = False
        self.inside: list[str] = []
        self.handles: list[Any] = []
        self._saved: set[int] = set()
        for name, module in watched.items():
            # A mark comes before anything that FSDP2 does at the same place: first before forward, closest to the
            # module before backward, so that its gathers and reductions fall into the segment that the mark opens.
            enter, wrap, leave = (functools.partial(act, name) for act in (self._enter, self._wrap, self._leave))
            self.handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self.handles.append(module.register_forward_pre_hook(wrap, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave, prepend=True))

    def watch_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(self._gradient, name)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.inside.append(name)
        self.recorder.mark("enter", name, recomputed=self.in_backward)

    def _wrap(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.in_backward or not torch.is_grad_enabled():
            return args, kwargs
        # A tensor that is given twice stays one: nn.MultiheadAttention computes less where query, key and value are.
        tensors = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad}
        if not tensors:
            return args, kwargs
        leave = functools.partial(self.recorder.mark, "leave", name)
        wrapped = dict(zip(tensors, _LeaveBackward.apply(leave, *tensors.values()), strict=True))
        return tree_map_only(Tensor, lambda t: wrapped.get(id(t), t), (args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.recorder.mark("leave", name, recomputed=self.in_backward)
        self.inside.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        outputs = self.recorder.trace.outputs
        if self.in_backward:
            return
        outputs[name] = outputs.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)
        entered: list[bool] = []

        def enter_backward(grad: Tensor) -> None:
            if not entered:  # the first gradient of any output begins the module's backward
                entered.append(True)
                self.recorder.mark("enter", name)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(enter_backward)

    def _gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.recorder.hand_over(name, parameter.grad)
        parameter.grad = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Books each saved storage once, with the module that runs when it is first saved."""
        recorder = self.recorder

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in recorder.outside and storage._cdata not in self._saved:
                self._saved.add(storage._cdata)
                where = self.inside[-1] if self.inside else ""
                recorder.trace.saved[where] = recorder.trace.saved.get(where, 0) + storage.nbytes()
            return tensor.detach()  # with its history it would keep itself alive where no backward comes

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def flush(self, model: nn.Module) -> None:
        """Leaves what no input gradient has left, the root first: FSDP2 reduces those units when backward ends.

        So it does with modules that no gradient reached at all, with zeros. Modules that share a parameter are one
        unit, and are left together.
        """
        marks, turn = self.recorder.trace.marks, self.recorder.trace.backward_mark
        called = {mark.name for mark in marks[:turn] if mark.kind == "enter"}
        backward = [mark for mark in marks[turn:] if not mark.recomputed]
        entered = Counter(mark.name for mark in backward if mark.kind == "enter")
        left = Counter(mark.name for mark in backward if mark.kind == "leave")
        modules = dict(model.named_modules())
        waiting = {name: set(module._parameters.values()) for name, module in modules.items()}
        waiting = {
            name: own
            for name, own in waiting.items()
            if entered[name] > left[name]
            or (name in called and not left[name] and any(p.requires_grad for p in modules[name].parameters()))
        }
        while waiting:
            first, own = next(iter(waiting.items()))
            for name in [name for name, others in waiting.items() if name == first or (own & others) - {None}]:
                self.recorder.mark("leave", name)
                del waiting[name]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def run_trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None,
    watched: Mapping[str, nn.Module],
    recompute: Mapping[str, Recompute] | None = None,
    book_saved: bool = False,
    cast: Sequence[nn.Module] = (),
    input_dtype: torch.dtype | None = None,
    held: HeldDtypes | None = None,
    measures: bool = False,
    pace: Pace | None = None,
    kernels: SeesKernels | None = None,
) -> RawTrace:
    """One forward and backward of a model on fake tensors; `recompute` says which modules are checkpointed, and how.

    The modules in `cast` cast floating inputs to `input_dtype`, as FSDP2 does; the casts count as activations.
    """
    constants = [
        *model.parameters(),
        *model.buffers(),
        *(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)),
    ]
    names = {name for name, _ in model.named_parameters()}
    recorder = Recorder({tensor.untyped_storage()._cdata for tensor in constants}, pace, kernels, measures=measures)
    hooks = Hooks(recorder, watched)
    hooks.watch_gradients(model)
    for module in cast:
        casting = functools.partial(_cast_inputs, recorder, input_dtype)
        hooks.handles.append(module.register_forward_pre_hook(casting, with_kwargs=True))
    originals: list[tuple[nn.Module, dict[str, Any]]] = []  # a compiled block's forward is its own attribute
    for name, how in (recompute or {}).items():
        module = model.get_submodule(name)
        originals.append((module, {key: each for key, each in vars(module).items() if key == "forward"}))
        host = _TracedHost(recorder, name)
        module.forward = checkpointed(module.forward, how, host=host, preserve_rng_state=False)  # type: ignore[method-assign]
    try:
        seen = _nothing() if held is None else held.seen(model, hooks.inside)
        with recorder, seen, hooks.saving() if book_saved else _nothing():
            recorder.mark("begin", "")
            uses = recorder.uses = ParameterUses(model, hooks.inside)
            output = model(*args, **kwargs)
            scalar = loss(output) if loss is not None else output
            recorder.uses = None
            del output
            recorder.trace.backward_mark = len(recorder.trace.marks)
            recorder.mark("turn", "")
            hooks.in_backward = True
            if held is not None:
                held.turn()
                recorder.trace.differs = held.differs
            scalar.backward()
            recorder.mark("end", "")
            hooks.flush(model)
            del scalar
    finally:
        hooks.remove()
        for module, own in originals:
            del module.forward
            vars(module).update(own)
    recorder.trace.end_live = recorder.live
    called = {mark.name for mark in recorder.trace.marks if mark.kind == "enter"}
    if made := {name for name, _ in model.named_parameters()} - names:
        raise CaptureError(
            f"{type(model).__name__} makes the parameter {min(made)} in its first forward: run the model once on its"
            " inputs before it is planned"
        )
    recorder.trace.used_outside = {name: place for name, place in uses.outside.items() if name in called}
    return recorder.trace


def _cast_inputs(
    recorder: Recorder, dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    given = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    recorder.cast()
    return given


@contextmanager
def _nothing() -> Iterator[None]:
    yield
