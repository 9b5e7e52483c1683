"""`capture`: from a module and its inputs to a `ModelGraph`, on fake tensors; see the notes in graph.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from osdp._torch import FakeTensorMode, tree_leaves, tree_map_only
from osdp.errors import OsdpError
from osdp.model.assemble import CaptureError, Cut, GrowingTrace, build_trace, cut_stages, fit_growth, renamed
from osdp.model.beside import Beside, no_garbage_collection
from osdp.model.depth import Short, shortened
from osdp.model.fake import DTYPES, fake_copy, sequences_not_packed
from osdp.model.graph import Affine, ModelGraph, Operator, Parameter, Stage, Trace
from osdp.model.measure import OperatorCosts, measure_operators
from osdp.model.structure import find_parts, operators_below, own_blocks, owns_parameters, signature, split_dim
from osdp.model.trace import RawTrace, run_trace

_LIKELY = 4  # the batch size of the check, where batch 1 takes kernels of its own, as in most: begun before it is known

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
    compute_dtype: str = "bf16",
    seq_len: int | None = None,
) -> ModelGraph:
    """Measures a model without running it: parameters, operators, stages, memory, FLOPs, and their growth.

    `example_inputs` is a tuple of positional inputs, a dict of keyword inputs, or a function of the batch size that
    returns both. `loss` maps the model's output to a scalar; without it the output must be one, or have `.loss`.
    The model may live on any device, the meta device included; it is neither changed nor run.
    """
    inputs = example_inputs if callable(example_inputs) else scaled_inputs(example_inputs)
    with no_garbage_collection():
        taken = _taken(model, inputs, loss, compute_dtype)
        return taken.graph(model, name or type(model).__name__, seq_len)


def _taken(model: nn.Module, inputs: Inputs, loss: Callable[[Any], Tensor] | None, dtype_name: str) -> _Taken:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    short = shortened(model, own_blocks(model))
    if short is not None:
        try:
            with Beside[RawTrace]() as whole:
                started = 0

                def check(batch: int) -> None:
                    nonlocal started
                    if batch != started:
                        started = batch
                        whole.start(lambda: _at_full_depth(model, inputs, loss, dtype_name, mode, batch))

                check(_LIKELY)
                taken = _Taken.of(model, inputs, loss, dtype_name, mode, short, check)
                if taken.agrees_with(whole.result()):
                    return taken
        except Exception:
            pass  # full depth, below, works or says why not
    try:
        return _Taken.of(model, inputs, loss, dtype_name, mode, None)
    except OsdpError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be traced on fake tensors: {type(error).__name__}: {_first_line(error)}; "
            "data-dependent shapes and .item() calls must go, or be guarded, for planning"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def scaled_inputs(example: Any) -> Inputs:
    """Inputs at any batch size from an example: every tensor whose first size is the example's batch is scaled."""
    if isinstance(example, Tensor):
        example = (example,)
    args, kwargs = ((), example) if isinstance(example, Mapping) else (tuple(example), {})
    sizes = [t.shape[0] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() > 0]
    if not sizes:
        raise CaptureError("example_inputs hold no tensor with a batch dimension; pass a tuple or dict of tensors")
    example_batch = sizes[0]

    def at(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def scale(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != example_batch:
                return tensor
            return torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

        return tree_map_only(Tensor, scale, (args, dict(kwargs)))

    return at


@dataclass
class _Taken:
    """The captures of one copy of the model, short or whole, and what is needed to read them."""

    inputs: Inputs
    loss: Callable[[Any], Tensor] | None
    dtype_name: str
    mode: FakeTensorMode
    short: Short | None
    blocks: list[str]
    operators: set[str]
    plain: GrowingTrace
    recomputed: GrowingTrace | None
    cuts: list[Cut]
    recomputed_cuts: list[Cut]
    raw: dict[int, RawTrace]
    batches: tuple[int, ...]

    @staticmethod
    def of(
        model: nn.Module,
        inputs: Inputs,
        loss: Callable[[Any], Tensor] | None,
        dtype_name: str,
        mode: FakeTensorMode,
        short: Short | None,
        check: Callable[[int], None] = lambda batch: None,
    ) -> _Taken:
        """Traces the model; `check` is told the batch size for the check as soon as it is known."""
        with mode:
            fake = fake_copy(model, DTYPES[dtype_name])
            if short is not None:
                short.cut(fake)
        blocks = own_blocks(fake)
        modules = dict(fake.named_modules())
        operators = {name for name, module in modules.items() if owns_parameters(module)}
        run = _Runner(fake, inputs, loss, mode, _watched(fake, blocks), DTYPES[dtype_name])
        batches, raw = _growing(run.plain, third=short is None, check=check)
        plain = fit_growth(raw)
        cuts = cut_stages(plain, blocks, operators)
        recomputed, recomputed_cuts = None, None
        if cuts is not None and blocks:
            checkpointed = [modules[block] for block in blocks]
            recomputed = fit_growth({batch: run.recomputed(batch, checkpointed) for batch in batches[:2]})
            recomputed_cuts = cut_stages(recomputed, blocks, operators)
        if cuts is None or recomputed_cuts is None:
            turn, end = plain.backward_mark, len(plain.marks)
            blocks, recomputed = [], None
            cuts = recomputed_cuts = [Cut(None, (0, turn), (turn, end))]
        return _Taken(
            inputs,
            loss,
            dtype_name,
            mode,
            short,
            blocks,
            operators,
            plain,
            recomputed,
            cuts,
            recomputed_cuts,
            raw,
            batches,
        )

    def agrees_with(self, whole: RawTrace) -> bool:
        """Whether the expanded short trace equals one capture at full depth, kernel by kernel."""
        batch = self.batches[1] + 1
        traces = [trace for _, trace, _ in self._stages]
        passes = [trace.forward for trace in traces] + [trace.backward for trace in reversed(traces)]
        kernels = [[getattr(s, what) for stretches in passes for s in stretches] for what in ("flops", "moved")]
        size = np.array([1, batch])
        return (
            _levels(traces, batch) == (_mark_peaks(whole), whole.end_live)
            and [stretch.mark for stretches in passes for stretch in stretches] == whole.marks
            and (np.concatenate(kernels[0]) @ size).tolist() == whole.flops
            and (np.concatenate(kernels[1]) @ size).tolist() == whole.moved
        )

    @cached_property
    def _stages(self) -> list[tuple[str | None, Trace, Trace | None]]:
        """Every stage of the full model: its block's name, its plain and its recomputed trace."""
        names = self.short.stands_for if self.short else {block: block for block in self.blocks}
        expand: dict[str, list[str]] = {}
        for name, stand_in in names.items():
            expand.setdefault(stand_in, []).append(name)
        stages: list[tuple[str | None, Trace, Trace | None]] = []
        for cut, again in zip(self.cuts, self.recomputed_cuts, strict=True):
            plain = build_trace(self.plain, cut)
            recomputed = build_trace(self.recomputed, again) if self.recomputed else None
            if cut.block is None:
                differs = recomputed is not None and _shape(recomputed, "") != _shape(plain, "")
                stages.append((None, plain, recomputed if differs else None))
                continue
            for name in expand[cut.block]:
                rename = cut.block, name
                stages.append((name, renamed(plain, rename), recomputed and renamed(recomputed, rename)))
        return stages

    def graph(self, model: nn.Module, name: str, seq_len: int | None) -> ModelGraph:
        parameters = _parameters(model)
        modules = dict(model.named_modules())
        costs = measure_operators(self.raw, self.plain, self.operators)
        short_name = self.short.name if self.short is not None else str
        operators = {
            key: _operator(key, module, parameters, costs[short_name(key)])
            for key, module in modules.items()
            if owns_parameters(module)
        }
        args, kwargs = self.inputs(self.batches[0])
        args2, kwargs2 = self.inputs(self.batches[1])
        first, second = _tensor_bytes((args, kwargs)), _tensor_bytes((args2, kwargs2))
        slope = (second - first) // (self.batches[1] - self.batches[0])
        return ModelGraph(
            name=name,
            compute_dtype=self.dtype_name,
            parameters=parameters,
            operators=operators,
            stages=_numbered(self._stages, modules, operators),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
            input_bytes=Affine(first - slope * self.batches[0], slope),
            batches=(*self.batches[:2], self.batches[1] + 1),
            seq_len=seq_len,
        )


def _at_full_depth(
    model: nn.Module,
    inputs: Inputs,
    loss: Callable[[Any], Tensor] | None,
    dtype_name: str,
    mode: FakeTensorMode,
    batch: int,
) -> RawTrace:
    with mode:
        fake = fake_copy(model, DTYPES[dtype_name])
    run = _Runner(fake, inputs, loss, mode, _watched(fake, own_blocks(fake)), DTYPES[dtype_name])
    return run.check(batch)


@dataclass(frozen=True)
class _Runner:
    """Runs one traced step of a fake model at a batch size."""

    model: nn.Module
    inputs: Inputs
    loss: Callable[[Any], Tensor] | None
    mode: FakeTensorMode
    watched: Mapping[str, nn.Module]
    dtype: torch.dtype

    def plain(self, batch: int) -> RawTrace:
        return self._run(batch, (), book_saved=True)

    def check(self, batch: int) -> RawTrace:
        return self._run(batch, (), book_saved=False)

    def recomputed(self, batch: int, modules: Sequence[nn.Module]) -> RawTrace:
        return self._run(batch, modules, book_saved=False)

    def _run(self, batch: int, recompute: Sequence[nn.Module], book_saved: bool) -> RawTrace:
        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

        with self.mode:
            args, kwargs = tree_map_only(Tensor, fake, self.inputs(batch))
            with sequences_not_packed(kwargs):
                return run_trace(
                    self.model,
                    args,
                    kwargs,
                    loss=self.loss or _default_loss,
                    watched=self.watched,
                    recompute=recompute,
                    book_saved=book_saved,
                    input_dtype=self.dtype,
                )


def _default_loss(output: Any) -> Tensor:
    scalar = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if scalar is None or scalar.numel() != 1:
        raise CaptureError(
            f"the model returns {type(output).__name__}, not a scalar loss; pass loss=, or give it labels"
        )
    return scalar


def _growing(
    run: Callable[[int], RawTrace], *, third: bool, check: Callable[[int], None]
) -> tuple[tuple[int, ...], dict[int, RawTrace]]:
    """Captures at batches 1 and 2, or at 2 and 3 where batch 1 takes kernels of its own; `third`: and at one more.

    `check` is given a size that the lines were not drawn through: it checks them too.
    """
    raw = {batch: run(batch) for batch in (1, 2)}
    differs = raw[1].marks != raw[2].marks or raw[1].mark_kernel != raw[2].mark_kernel
    check(4 if differs else 3)
    if differs:
        del raw[1]
        raw[3] = run(3)
    if third:
        raw[max(raw) + 1] = run(max(raw) + 1)
    return tuple(raw), raw


def _watched(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    parts = [part for block in blocks for part in find_parts(modules[block], block)]
    names = {*blocks, *parts}
    return {name: module for name, module in modules.items() if name in names or owns_parameters(module)}


def _levels(traces: Sequence[Trace], batch: int) -> tuple[list[int], int]:
    """The highest level of every stretch of the joined plain traces, and the level at the end."""
    level, peaks = 0, []
    passes = [trace.forward for trace in traces] + [trace.backward for trace in reversed(traces)]
    for stretches in passes:
        peaks.extend(level + stretch.peak_at(batch) for stretch in stretches)
        if stretches:
            level += stretches[-1].end.at(batch)
    return peaks, level


def _mark_peaks(raw: RawTrace) -> list[int]:
    peaks = []
    for index, start in enumerate(raw.mark_kernel):
        last = index + 1 == len(raw.marks)
        stop = len(raw.live) if last else raw.mark_kernel[index + 1]
        end = raw.end_live if last else raw.mark_live[index + 1]
        peaks.append(max(raw.mark_live[index], end, *raw.live[start:stop], 0))
    return peaks


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    parameters = {}
    for key, parameter in found.items():
        first, *aliases = names[key]
        dtype = str(parameter.dtype).removeprefix("torch.")
        parameters[first] = Parameter(first, tuple(parameter.shape), dtype, parameter.requires_grad, tuple(aliases))
    return parameters


def _operator(name: str, module: nn.Module, parameters: Mapping[str, Parameter], costs: OperatorCosts) -> Operator:
    canonical = {alias: first for first, parameter in parameters.items() for alias in (first, *parameter.aliases)}
    prefix = f"{name}." if name else ""
    owned = tuple(canonical[prefix + key] for key, value in module._parameters.items() if value is not None)
    return Operator(name, type(module).__name__, owned, split_dim=split_dim(module), **costs.__dict__)


def _numbered(
    stages: Sequence[tuple[str | None, Trace, Trace | None]],
    modules: Mapping[str, nn.Module],
    operators: Mapping[str, Operator],
) -> tuple[Stage, ...]:
    kinds: dict[object, int] = {}
    numbered = []
    blocks = {name for name, _, _ in stages if name is not None}
    inside = {name for block in blocks for name in operators_below(modules[block], block)}
    for index, (block, plain, recomputed) in enumerate(stages):
        if block is None:
            entered = {s.mark.name for s in plain.forward if s.mark.kind == "enter"}
            owned = tuple(name for name in operators if name in entered and name not in inside)
            key: object = ("outside", index)
            parts: tuple[str, ...] = ()
        else:
            owned = tuple(operators_below(modules[block], block))
            parts = tuple(find_parts(modules[block], block))
            key = (signature(modules[block]), _shape(plain, block), _shape(recomputed, block) if recomputed else None)
        name = block or ("start" if index == 0 else "end" if index + 1 == len(stages) else f"between.{index}")
        numbered.append(
            Stage(name, block is not None, kinds.setdefault(key, len(kinds)), owned, parts, plain, recomputed)
        )
    return tuple(numbered)


def _shape(trace: Trace, block: str) -> tuple[object, ...]:
    """A trace without its block's name: equal for stages that are alike."""
    return tuple(
        (
            s.mark.kind,
            s.mark.name.removeprefix(block),
            s.mark.again,
            s.peak,
            s.end,
            s.flops.tobytes(),
            s.moved.tobytes(),
        )
        for s in (*trace.forward, *trace.backward)
    )


def _tensor_bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor))
