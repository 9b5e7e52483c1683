"""The traces of compiled blocks: a step on fake tensors in which blocks run as torch.compile writes them.

[Note: Compiled traces]
Every kind of block is written once for each batch size, by torch's own code (see [Note: Partition] in
osdp._torch.partition), and the traced step runs what was written in place of the block's forward and backward. What is
alive in between is what compiled code saves, to the byte. What is alive while a block runs is that of code for CPUs; at
other batch sizes a bound, see [Note: Uneven segments] in compiled_growth.py. For accelerators torch fuses otherwise:
there it is an estimate, and more where a graph cannot be written and runs operator by operator.

A compiled block has no modules inside: it is entered, left, and gives gradients. Kernels, and so times, stay those of
the eager trace, and their segments come first between two marks of the block; segments of the compiled trace follow,
with no kernels. Recomputed blocks run the compiled forward again; selectively recomputed ones have the checkpoint
inside of what is compiled, as they run (see [Note: Compiled blocks] in osdp.runtime.compiled).

A block that torch.compile does not take as a whole runs as eager code here, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from osdp._torch import FakeTensorMode, tree_leaves
from osdp.model.graph import ZERO, Affine, Mark, Segment, Trace
from osdp.model.inputs import CaptureError
from osdp.model.selective import checkpointed
from osdp.recompute import Recompute


class StageTraces(NamedTuple):
    """The traces of a stage; see `osdp.model.graph.Stage`. Inputs of compiled blocks are not on the host."""

    plain: Trace
    recomputed: Trace | None
    selective: Trace | None
    on_host: Trace | None = None


class CompiledBlocks:
    """Blocks of a fake model that run as torch.compile writes them; `failed` says of which kinds they do not."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], mode: FakeTensorMode) -> None:
        from osdp._torch.partition import Partition  # here, because it imports compilers

        self._blocks = [model.get_submodule(block) for block in blocks]
        self._partition = Partition(mode)
        self._prepared: set[object] = set()
        self._eager: set[int] = set()
        self.failed: dict[str, str] = {}

    @property
    def eager_blocks(self) -> int:
        """How many blocks were found to run as eager code."""
        return len(self._eager)

    @contextmanager
    def running(self, selective: Collection[nn.Module]) -> Iterator[None]:
        """Within it blocks run so; those in `selective` with a selective checkpoint inside."""
        originals = [(block, vars(block).get("forward")) for block in self._blocks]
        for block in self._blocks:
            inner = block.forward
            if block in selective:
                inner = checkpointed(inner, Recompute.SELECTIVE, preserve_rng_state=False)
            block.forward = partial(self._call, block, inner)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for block, own in originals:
                vars(block).pop("forward", None)
                if own is not None:
                    block.forward = own  # type: ignore[method-assign]

    def _call(self, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if id(block) in self._eager:
            return inner(*args, **kwargs)
        key = id(block), isinstance(inner, partial), _described((args, kwargs))
        if key not in self._prepared:
            try:
                self._partition.prepare(inner, args, kwargs, list(block.parameters()))
            except Exception as error:
                self._eager.add(id(block))
                self.failed.setdefault(type(block).__name__, reason_of(error))
                return inner(*args, **kwargs)
            self._prepared.add(key)
        return self._partition.call(inner, args, kwargs)


def reason_of(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _described(tree: Any) -> tuple[object, ...]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) for leaf in leaves)


def with_levels(eager: Trace, compiled: Trace) -> Trace:
    """A stage's kernels of one trace with the marks of a block, and the bytes, of the other.

    See [Note: Compiled traces].
    """
    return Trace(_merged(eager.forward, compiled.forward), _merged(eager.backward, compiled.backward))


def _merged(eager: Sequence[Segment], compiled: Sequence[Segment]) -> tuple[Segment, ...]:
    shared = {segment.mark for segment in compiled if segment.mark.kind != "gradient"}
    kernels, levels = _spans(eager, shared), _spans(compiled, shared)
    if [span[0].mark for span in kernels[1:]] != [span[0].mark for span in levels[1:]]:
        raise CaptureError("its blocks are entered and left in another order")
    merged = _opening(kernels[0], levels[0])
    for mine, theirs in zip(kernels[1:], levels[1:], strict=True):
        first, *gradients = theirs
        entered, *inside = _without_gradients(mine)
        merged.append(replace(first, flops=entered.flops, moved=entered.moved, kinds=entered.kinds))
        merged += [_level(each, first.end) for each in inside]
        merged += [_without_kernels(each) for each in gradients]
    return tuple(merged)


def _spans(segments: Sequence[Segment], shared: Collection[Mark]) -> list[list[Segment]]:
    """What comes before the first shared mark, and what follows each up to the next."""
    spans: list[list[Segment]] = [[]]
    for segment in segments:
        if segment.mark in shared:
            spans.append([])
        spans[-1].append(segment)
    return spans


def _opening(mine: Sequence[Segment], theirs: Sequence[Segment]) -> list[Segment]:
    """What a stage has before the first mark of both; its kernels lie in the first segment that there is."""
    entered = [_level(each, ZERO) for each in mine if each.mark.kind != "gradient"]
    found = [_without_kernels(each) for each in (*entered, *theirs)]
    if not found and any(len(each.flops) for each in mine):
        raise CaptureError("a block's gradients are complete elsewhere")
    for each in mine if found else ():
        found[0] = _joined(found[0], each)
    return found


def _without_gradients(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that open with a gradient joined to the one before."""
    found: list[Segment] = []
    for segment in segments:
        if segment.mark.kind == "gradient":
            found[-1] = _joined(found[-1], segment)
        else:
            found.append(segment)
    return found


def _joined(first: Segment, second: Segment) -> Segment:
    """The first segment, with the kernels of both."""
    return replace(
        first,
        flops=np.concatenate([first.flops, second.flops]),
        moved=np.concatenate([first.moved, second.moved]),
        kinds=np.concatenate([first.kinds, second.kinds]),
    )


def _level(segment: Segment, level: Affine) -> Segment:
    """The segment's kernels at a level that stays."""
    return replace(segment, peak=(level,), end=level, products=(), worked=(), attended=(), measured=(), depths=())


def _without_kernels(segment: Segment) -> Segment:
    return replace(segment, flops=segment.flops[:0], moved=segment.moved[:0], kinds=segment.kinds[:0])
