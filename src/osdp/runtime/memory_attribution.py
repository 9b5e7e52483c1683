"""What the bytes of a real step are: the recorder of a dry run, which also knows whose every allocation is.

[Note: Whose]
Parameters, optimizer states, buffers and inputs are there before the step. What FSDP2 or the runtime allocates is told
by the code that asks for it: a parameter's gathered copy, or a buffer of a collective. A gradient is known when it is
copied into its reduction, added to an earlier one, or named by a parameter in the end; then all of its life counts as
such. The rest are activations and temporaries of kernels, which only their use would tell apart: they are one part.

[Note: Kernels' copies]
A kernel of torch that is made of others allocates inside, which fake tensors do not show. Of those in a step it matters
in three: on CPUs, `_chunk_cat` copies gradients on their way into a reduction (see [Note: Copy-in] in
osdp.cost.lifetimes), and attention, and products in 16 bits, take working space (see [Note: Workspaces] in
osdp.model.kernels). The recorder makes the same copies, and adds that space, where it sees such a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from osdp._torch import tree_leaves
from osdp.cost.positions import BUFFERS, GATHERED, GRADIENTS, SAVED, TEMPORARIES
from osdp.model.kernels import DEEP, WORKSPACE_BYTES, attention_workspace, product_workspace, transposed_depth
from osdp.model.measured_space import Kernel, space_of
from osdp.model.trace import Recorder
from osdp.runtime.collective_recorder import Recording

ACTIVATIONS = f"{SAVED} and {TEMPORARIES}"

# Whoever asks for memory: the end of its file's name, and the part.
_ASKERS = (
    ("_fully_shard/_fsdp_collectives.py", BUFFERS),
    ("osdp/runtime/collectives.py", BUFFERS),
    ("_fully_shard/_fsdp_param.py", GATHERED),
    ("osdp/_torch/fsdp.py", GATHERED),
)
_CAST = "all_gather_inputs"  # of FSDP2's parameter: what is cast to be sent is a buffer
_FRAMES = 12  # from the allocation up to FSDP2 there are fewer


class MemoryAttributionRecorder(Recorder):
    """Follows every storage from its allocation to its end.

    `issued` records the collectives that it sees; None where they are carried, on CPUs.
    """

    def __init__(self, issued: Recording | None) -> None:
        super().__init__(set(), measures=issued is None)
        self._issued = issued
        self._part: list[str] = []  # of every storage that ever was, by its number
        self._number: dict[int, int] = {}  # a living storage's number
        self._changes: list[tuple[int, int, int]] = []  # the kernel before which bytes changed, a number, by how many
        self._workspaces: dict[int, int] = {}  # by allocation, what kernels take while they run
        self._asked = ACTIVATIONS

    def hold_as(self, part: str, tensors: Sequence[Tensor]) -> None:
        self._asked = part
        self.hold(tensors)
        self._asked = ACTIVATIONS

    def name(self, part: str, tensors: Sequence[Tensor]) -> None:
        """Says what storages are, and have been since they were allocated."""
        for tensor in tensors:
            number = self._number.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._part[number] = part

    def parts_at_peak(self) -> dict[str, int]:
        """The bytes of every part at the allocation with which most are alive."""
        peak = self.trace.live.index(max(self.trace.live))
        parts: dict[str, int] = {}
        for kernel, number, nbytes in self._changes:
            if kernel > peak:
                break
            parts[self._part[number]] = parts.get(self._part[number], 0) + nbytes
        parts[ACTIVATIONS] = parts.get(ACTIVATIONS, 0) + self._workspaces.get(peak, 0)
        return {part: nbytes for part, nbytes in parts.items() if nbytes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace = func.namespace
        if namespace == "c10d" and self._issued is not None:
            self._issued.seen(func, args)
        elif namespace == "fsdp" and func._opname == "chunk_cat":
            self.name(GRADIENTS, args[0])
            if self._issued is None:
                self._copy_in(*args, **kwargs)
        elif namespace == "fsdp" and func._opname == "split_with_sizes_copy":
            self.name(GATHERED, kwargs["out"])
        elif func is torch.ops.aten.cat.default and _asker() == BUFFERS:  # see [Note: Shard dimension]
            self.name(GRADIENTS, args[0])
        elif func is torch.ops.aten.cat.out and _asker() == BUFFERS:
            self.name(GATHERED, [kwargs["out"]])
        elif func is torch.ops.aten.add_.Tensor and _asker() == GATHERED:  # a micro-batch's gradient to the earlier one
            self.name(GRADIENTS, [t for t in tree_leaves(args) if isinstance(t, Tensor)])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy_in(self, gradients: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
        """See [Note: Kernels' copies]."""
        with self:
            padded = [_padded(gradient, num_chunks) for gradient in gradients]
            for each in padded if out.dtype != gradients[0].dtype else ():
                torch.empty_like(each)

    def _hold(self, tensor: Tensor) -> bool:
        fresh = super()._hold(tensor)
        if fresh:
            key = self._key(tensor)
            self._number[key] = len(self._part)
            self._part.append(self._asked if self._asked != ACTIVATIONS else _asker())
            self._changes.append((len(self.trace.live), self._number[key], self._alive[key][1]))
        return fresh

    @staticmethod
    def _key(tensor: Tensor) -> int:
        local = getattr(tensor, "_local_tensor", tensor)
        return local.untyped_storage()._cdata

    def _freed(self, key: int, _: object) -> None:
        entry = self._alive.get(key)
        if entry is not None:
            self._changes.append((len(self.trace.live), self._number.pop(key), -entry[1]))
        super()._freed(key, _)

    def _workspace(self, func: Any, args: Sequence[Any]) -> tuple[int, int]:
        if self._issued is not None:  # not on CPUs
            return 0, 0
        depth = transposed_depth(func, args)
        product = WORKSPACE_BYTES if depth >= DEEP else min(product_workspace(func, args), WORKSPACE_BYTES)
        return product + attention_workspace(func, args), depth

    def _works(self, kernel: Kernel) -> None:
        space = self._workspaces[len(self.trace.live) - 1] = space_of(kernel) or 0
        self.trace.live[-1] += space

    def _point(self, flops: int, moved: int, kind: int = 0, workspace: int = 0, depth: int = 0) -> None:
        """Working space is there while the kernel runs, and only then."""
        super()._point(flops, moved, kind, workspace, depth)
        self.trace.live[-1] += workspace
        if workspace:
            self._workspaces[len(self.trace.live) - 1] = workspace

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        with super().following_resizes():
            counted = torch.UntypedStorage.resize_

            def known(storage: torch.UntypedStorage, size: int) -> Any:
                number = self._number.get(storage._cdata)
                if number is not None:
                    self._changes.append((len(self.trace.live), number, size - storage.nbytes()))
                return counted(storage, size)

            torch.UntypedStorage.resize_ = known  # type: ignore[method-assign]
            yield


def _padded(gradient: Tensor, ranks: int) -> Tensor:
    missing = -gradient.shape[0] % ranks
    return torch.nn.functional.pad(gradient, [0, 0] * (gradient.dim() - 1) + [0, missing]) if missing else gradient


def _asker() -> str:
    """The part of what is being allocated: who asks for it is a few frames up."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        name = frame.f_code.co_filename
        for ending, part in _ASKERS:
            if name.endswith(ending):
                return BUFFERS if frame.f_code.co_name == _CAST else part
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ACTIVATIONS
