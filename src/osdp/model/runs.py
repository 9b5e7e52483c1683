"""The traced runs of one fake model: plain ones at a few batch sizes, and those with blocks recomputed.

[Note: Batches]
Batches 2 and 3 draw the lines of [Note: Growth], and 4 checks them: batch 1 does not run in some models (a batch norm
over one value), and takes kernels of its own in most. Where no line fits (a contrastive loss compares every sample with
every other), the graph is of one batch size, and plans are for that one only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from osdp._torch import FakeTensorMode, without_modes
from osdp.cluster.device import Device
from osdp.model.compiled_blocks import CompiledBlocks
from osdp.model.device_kernels import kernels_of
from osdp.model.fake import (
    DTYPES,
    compiling_nothing,
    fake_copy,
    same_draws,
    sequences_not_packed,
    settled,
    torch_says_nothing,
    without_layerdrop,
)
from osdp.model.graph import Affine, Trace
from osdp.model.held_dtype import HeldDtypes, units_by_granularity
from osdp.model.inputs import CaptureError, Inputs, map_tensors, output_loss, tensors_in
from osdp.model.pace import Pace
from osdp.model.shorten import Short
from osdp.model.stages import Cut, GrowingTrace, build_trace, cut_stages, fit_growth, shape_of
from osdp.model.structure import find_parts, own_blocks, owns_parameters
from osdp.model.trace import RawTrace, Recorder, SeesKernels, run_trace
from osdp.model.two_batches import KernelPairs, Kernels
from osdp.model.values import NOT_DROPPED, Values, fake_of
from osdp.planfile import WHOLE, Granularity
from osdp.recompute import Recompute

BATCHES = (2, 3)
CHECKED = 4
LENGTHS = (16, 32)  # of inputs that tell how the number of kernels grows with theirs


@dataclass(frozen=True)
class Runner:
    """Runs one traced step of a fake model at a batch size."""

    model: nn.Module
    inputs: Inputs
    loss: Callable[[Any], Tensor] | None
    mode: FakeTensorMode
    blocks: Sequence[str]
    dtype: torch.dtype
    layers_dropped: bool
    root_is_operator: bool  # see [Note: Uncalled] in capture.py
    device: Device | None
    not_units: frozenset[str] = frozenset()  # see [Note: Used outside] in parameter_uses.py
    pace: Pace | None = None
    kernels: dict[int, Kernels] = field(default_factory=dict)  # of plain runs, by batch
    held: torch.dtype = torch.float32  # see [Note: Held dtype] in held_dtype.py, also of the next one
    granularity: Granularity = WHOLE

    @staticmethod
    def of(
        model: nn.Module,
        inputs: Inputs,
        loss: Callable[[Any], Tensor] | None,
        dtype: str,
        mode: FakeTensorMode,
        *,
        short: Short | None = None,
        root_is_operator: bool,
        device: Device | None,
        not_units: Iterable[str] = (),
        held_dtype: str = "fp32",
    ) -> Runner:
        with mode:
            fake = fake_copy(model, DTYPES[dtype], short.left_out(model) if short is not None else ())
            dropped = without_layerdrop(fake)
            settled(fake)
            if short is not None:
                short.cut(fake)
        out = frozenset(short.name(name) if short is not None else name for name in not_units)
        blocks = [block for block in own_blocks(fake) if block not in out]
        kind, held = DTYPES[dtype], DTYPES[held_dtype]
        return Runner(fake, inputs, loss, mode, blocks, kind, bool(dropped), root_is_operator, device, out, held=held)

    @property
    def operators(self) -> set[str]:
        found = {name for name, module in self.model.named_modules() if owns_parameters(module)}
        return found | {""} if self.root_is_operator else found

    @property
    def outermost(self) -> dict[str, nn.Module]:
        """The blocks, and the operators that are in none: what is inside of a compiled block is not called."""
        modules = dict(self.model.named_modules())
        inside = {name for block in self.blocks for name in modules if name.startswith(f"{block}.")}
        outermost = {*self.blocks, *self.operators} - inside - self.not_units
        return {name: modules[name] for name in modules if name in outermost}

    @property
    def watched(self) -> dict[str, nn.Module]:
        found = watched(self.model, self.blocks, self.operators)
        return {name: module for name, module in found.items() if name not in self.not_units}

    def plain(self, batch: int) -> RawTrace:
        kernels = self.kernels[batch] = Kernels()
        trace = self._run(batch, {}, book_saved=True, kernels=kernels)
        kernels.measured.extend(trace.to_measure.values())
        return trace

    def check(self, batch: int) -> RawTrace:
        """One that checks the others, in a process of its own: it measures nothing."""
        return self._run(batch, {}, book_saved=False, measures=False)

    def recomputed(self, batch: int, how: Mapping[str, Recompute]) -> RawTrace:
        return self._run(batch, how, book_saved=False)

    def recomputed_at(self, batches: Sequence[int], how: Mapping[str, Recompute]) -> dict[int, RawTrace]:
        """At two batch sizes of plain runs, from one trace where that is possible; see [Note: Two batches]."""
        if len(batches) != 2 or not self.kernels.keys() >= set(batches):
            return {batch: self.recomputed(batch, how) for batch in batches}
        one, other = batches
        pairs = KernelPairs(self.kernels[one], self.kernels[other])
        trace = self._run(one, how, book_saved=False, kernels=pairs)
        first, second = pairs.divided(trace)
        return {one: first, other: second if pairs.is_complete else self.recomputed(other, how)}

    def selectively(self, batches: Sequence[int]) -> dict[int, RawTrace] | str:
        """With every block recomputed selectively; why not, where that does not run."""
        how = dict.fromkeys(self.blocks, Recompute.SELECTIVE)
        try:
            return self.recomputed_at(batches, how)
        except Exception as error:
            return _reason(error)

    def compiled(self, compiled: CompiledBlocks, batch: int, blocks: Sequence[str], how: Recompute) -> RawTrace:
        """The same step with its blocks compiled; see [Note: Compiled traces] in compiled_blocks.py."""
        selective = [self.model.get_submodule(block) for block in blocks] if how is Recompute.SELECTIVE else []
        with compiled.running(selective):
            around = {} if selective else dict.fromkeys(blocks, how)
            return self._run(batch, around, book_saved=False, compiled=True)

    def _run(
        self,
        batch: int,
        recompute: Mapping[str, Recompute],
        *,
        book_saved: bool,
        compiled: bool = False,
        kernels: SeesKernels | None = None,
        measures: bool = True,
    ) -> RawTrace:
        units = units_by_granularity(self.model, self.blocks, self.not_units)
        inputs = self.inputs(batch)  # outside the mode: fake ones would have no values
        is_real = self.device is None or self.device.is_cpu
        with same_draws(), torch_says_nothing(), self.mode, Values(batch) as values:
            args, kwargs = map_tensors(fake_of, inputs)
            eager = nullcontext() if compiled else compiling_nothing()
            with eager, sequences_not_packed(kwargs), kernels_of(self.device, self.model, compiled=compiled):
                trace = run_trace(
                    self.model,
                    args,
                    kwargs,
                    loss=self.loss or output_loss,
                    watched=self.outermost if compiled else self.watched,
                    recompute=recompute,
                    book_saved=book_saved,
                    cast=[self.model, *(self.model.get_submodule(name) for name in sorted(units[self.granularity]))],
                    input_dtype=self.dtype,
                    held=HeldDtypes(
                        self.held, self.dtype, units, self.granularity, compiled=self.blocks if compiled else ()
                    ),
                    measures=measures and is_real and not compiled,
                    pace=self.pace,
                    kernels=kernels,
                )
        trace.assumptions = [*([f"{NOT_DROPPED} (layerdrop)"] if self.layers_dropped else []), *values.assumptions]
        return trace


def watched(model: nn.Module, blocks: Sequence[str], more: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules whose entering and leaving is marked: blocks, their parts, operators, and those in `more`."""
    modules = dict(model.named_modules())
    parts = [part for block in blocks for part in find_parts(modules[block], block)]
    names = {*blocks, *parts, *more}
    return {name: module for name, module in modules.items() if name in names or owns_parameters(module)}


@dataclass
class Recomputed:
    """The trace with blocks recomputed, those blocks, and a line for every kind of block that cannot be.

    `selective` is the same of those blocks recomputed selectively; None where that does not run. `on_host` is the same
    of those whose input is on the host; empty where none was asked for, or can be.
    """

    trace: GrowingTrace | None = None
    cuts: list[Cut] | None = None
    blocks: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    selective: tuple[GrowingTrace, list[Cut]] | None = None
    on_host: dict[str, Trace] = field(default_factory=dict)

    def traces(self, index: int) -> tuple[Trace | None, Trace | None, Trace | None]:
        """Of a stage the recomputed trace, the selective one, and that on the host; None where there is none."""
        if self.trace is None or self.cuts is None:
            return None, None, None
        cut = self.cuts[index]
        if cut.block is not None and cut.block not in self.blocks:
            return None, None, None
        selective = None if self.selective is None else build_trace(self.selective[0], self.selective[1][index])
        return build_trace(self.trace, cut), selective, self.on_host.get(cut.block or "")


def try_recompute(
    run: Runner, batches: Sequence[int], cuts: Sequence[Cut], selectively: Callable[[], dict[int, RawTrace] | str]
) -> Recomputed:
    """Recomputes all blocks, else the kinds of blocks that can be: the others lose the option.

    `selectively` gives the traces with all blocks recomputed selectively, or says why there are none.
    """
    found = _try_full(run, batches, cuts)
    if found.trace is None or run.granularity != WHOLE:  # selectively only blocks that are one unit are
        return found
    blocks = [cut.block for cut in cuts if cut.block in found.blocks and cut.block is not None]
    try:
        if set(blocks) == set(run.blocks):
            raw = selectively()
            if isinstance(raw, str):
                raise CaptureError(raw)
            trace = fit_growth(raw)
            found.selective = trace, _cuts_as(run, trace, cuts)
        else:
            found.selective = _recomputed(run, batches, dict.fromkeys(blocks, Recompute.SELECTIVE), cuts)
        outside = (found.traces(index)[:2] for index, cut in enumerate(cuts) if cut.block is None)
        if any(full and other and shape_of(full, "") != shape_of(other, "") for full, other in outside):
            found.selective = None
            raise CaptureError("it changes what is held outside blocks")
    except Exception as error:
        found.notes.append(f"blocks are recomputed as a whole or not at all: selectively, one fails ({_reason(error)})")
    return found


def try_on_host(
    run: Runner, batches: Sequence[int], cuts: Sequence[Cut], again: Recomputed, check: Callable[[], None]
) -> None:
    """Traces blocks with their input on the host, all but the first of a row; where that or the check fails, none."""
    try:
        _put_on_host(run, batches, cuts, again)
        check()
    except Exception as error:
        again.on_host = {}
        again.notes.append(f"no block's input can be on the host: {_reason(error)}")


def _put_on_host(run: Runner, batches: Sequence[int], cuts: Sequence[Cut], again: Recomputed) -> None:
    behind = [cut.block for before, cut in pairwise(cuts) if before.block is not None and cut.block in again.blocks]
    blocks = {block: Recompute.ON_HOST if block in behind else Recompute.FULL for block in again.blocks}
    if again.trace is None or Recompute.ON_HOST not in blocks.values():
        return
    raw = {batch: run.recomputed(batch, blocks) for batch in batches}
    missing = next((block for block in behind if any(block not in each.on_host for each in raw.values())), None)
    if missing is not None:
        raise CaptureError(f"{missing} is given no tensor by position")
    trace = fit_growth(raw)
    there = {
        cut.block: replace(build_trace(trace, cut), on_host=_line({b: raw[b].on_host[cut.block] for b in batches}))
        for cut in _cuts_as(run, trace, cuts)
        if cut.block is not None and blocks.get(cut.block) is Recompute.ON_HOST
    }
    for index, cut in enumerate(_cuts_as(run, trace, cuts)):
        full = again.traces(index)[0] if cut.block is None else None
        if full and shape_of(build_trace(trace, cut), "") != shape_of(full, ""):
            raise CaptureError("it changes what is held outside blocks")
    again.on_host = there


def _line(nbytes: Mapping[int, int]) -> Affine:
    """What grows with the batch, from two batch sizes; from one, a constant."""
    (low, first), (high, second) = min(nbytes.items()), max(nbytes.items())
    slope = (second - first) // (high - low) if high > low else 0
    return Affine(first - slope * low, slope)


def _try_full(run: Runner, batches: Sequence[int], cuts: Sequence[Cut]) -> Recomputed:
    found = Recomputed()
    every = [cut.block for cut in cuts if cut.block is not None]
    try:
        return Recomputed(*_recomputed(run, batches, dict.fromkeys(every, Recompute.FULL), cuts), frozenset(every))
    except Exception as error:
        kinds: dict[str, list[str]] = {}
        for block in every:
            kinds.setdefault(type(run.model.get_submodule(block)).__name__, []).append(block)
        if len(kinds) == 1:
            found.notes.append(_cannot(next(iter(kinds)), error))
            return found
    able: list[str] = []
    for kind, blocks in kinds.items():
        try:
            traced = _recomputed(run, batches, dict.fromkeys([*able, *blocks], Recompute.FULL), cuts)
            able.extend(blocks)
            found = Recomputed(*traced, frozenset(able), found.notes)
        except Exception as error:
            found.notes.append(_cannot(kind, error))
    return found


def _cannot(kind: str, error: Exception) -> str:
    return f"{kind} blocks are not recomputed: a second forward of one does not repeat the first ({_reason(error)})"


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _recomputed(
    run: Runner,
    batches: Sequence[int],
    how: Mapping[str, Recompute],
    cuts: Sequence[Cut],
) -> tuple[GrowingTrace, list[Cut]]:
    trace = fit_growth(run.recomputed_at(batches, how))
    return trace, _cuts_as(run, trace, cuts)


def _cuts_as(run: Runner, trace: GrowingTrace, cuts: Sequence[Cut]) -> list[Cut]:
    """The trace's own cuts, of the same stages as these."""
    found = cut_stages(trace, run.blocks, run.operators)
    if found is None or [cut.block for cut in found] != [cut.block for cut in cuts]:
        raise CaptureError("its backward runs in another order")
    return found


def forward_kernels(make: Callable[[FakeTensorMode], Runner]) -> tuple[int, int] | None:
    """The kernels of one forward at a short length and at the inputs' own, from those at two short ones.

    None where inputs have no length, or a forward fails.

    It may be called in the middle of a trace; see [Note: Pace].
    """
    try:
        with without_modes(), torch_says_nothing():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            run = make(mode)
            given = run.inputs(BATCHES[0])
            sizes = Counter(size for tensor in tensors_in(given) for size in tensor.shape[1:] if size > 2 * LENGTHS[1])
            if not sizes:
                return None
            length = max(sizes, key=lambda size: (sizes[size], size))
            counts = [_kernels_at(run, map_tensors(partial(_cut, length, short), given)) for short in LENGTHS]
    except Exception:
        return None  # then nothing is said
    slope = (counts[1] - counts[0]) / (LENGTHS[1] - LENGTHS[0])
    return counts[0], int(counts[0] + slope * (length - LENGTHS[0]))


def _kernels_at(run: Runner, inputs: Any) -> int:
    with run.mode, Values(BATCHES[0]):
        args, kwargs = map_tensors(fake_of, inputs)
        with torch.no_grad(), kernels_of(run.device, run.model), Recorder(set()) as recorder:
            run.model(*args, **kwargs)
    return len(recorder.trace.live)


def _cut(length: int, short: int, tensor: Tensor) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if dim and size == length:
            tensor = tensor.narrow(dim, 0, short)
    return tensor
