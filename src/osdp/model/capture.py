"""`capture`: from a module and its inputs to a `ModelGraph`, on fake tensors; see the notes in graph.py.

[Note: Uncalled]
FSDP2 gives parameters of modules that are never called to the innermost unit around them. Where there is none but the
model itself (a tower that the inputs do not use), the model is an operator too: its unit holds them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from time import monotonic
from typing import Any

import numpy as np
from torch import Tensor, nn

from osdp._torch import FakeTensorMode
from osdp.cluster.device import Device
from osdp.model.compile_runs import try_compiled
from osdp.model.compiled_blocks import StageTraces, reason_of
from osdp.model.fake import refuse_own_checkpointing, refuse_sparse_gradients, refuse_uninitialized
from osdp.model.fork_worker import ForkWorker, no_garbage_collection
from osdp.model.graph import Affine, Mark, ModelGraph, Operator, Parameter, Trace
from osdp.model.inputs import Inputs, example_batch, has_rows, scaled_inputs, tensors_in
from osdp.model.operator_costs import OperatorCosts, measure_operators
from osdp.model.pace import Pace, depth_said, waiting_said
from osdp.model.parameter_uses import said_of
from osdp.model.refused import refused
from osdp.model.runs import BATCHES, CHECKED, Recomputed, Runner, forward_kernels, try_on_host, try_recompute
from osdp.model.shorten import Short, shortened
from osdp.model.stage_rows import TracedStage, numbered_stages
from osdp.model.stages import (
    CaptureError,
    Cut,
    GrowingTrace,
    UnevenGrowth,
    build_trace,
    cut_stages,
    fit_growth,
    renamed,
    shape_of,
)
from osdp.model.structure import own_blocks, owns_parameters, split_dim
from osdp.model.trace import RawTrace
from osdp.planfile import Granularity
from osdp.recompute import EVERY_RECOMPUTE, Recompute

_log = logging.getLogger("osdp")


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
    compute_dtype: str = "bf16",
    held_dtype: str = "fp32",
    seq_len: int | None = None,
    batch: int | None = None,
    device: Device | None = None,
    compiled: bool = False,
    on_host: bool = False,
) -> ModelGraph:
    """Measures a model without running it: parameters, operators, stages, memory, FLOPs, and their growth.

    `example_inputs` is a tuple of positional inputs, a dict of keyword inputs, or a function of the batch size that
    returns both; values of real tensors are used where the model asks for them, see [Note: Values]. `loss` maps the
    model's output to a scalar; without it the output must be one, or hold one; see `output_loss`. `held_dtype` is
    that of parameters that no unit has gathered, where a model asks for it; see [Note: Held dtype]. `batch` is the
    batch size to measure at where costs do not grow in a straight line with it, by default the example's. `device` is
    the one whose kernels are traced, by default this machine's CPU; see [Note: Device kernels]. With `compiled`, blocks
    have the memory that they have compiled; see [Note: Compiled traces]. With `on_host`, blocks are traced with their
    input on the host too; see [Note: Input on the host].
    The model may live on any device, the meta device included; it is neither changed nor run.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled one: its modules have the names that plans use
    refuse_own_checkpointing(model)
    refuse_sparse_gradients(model)
    refuse_uninitialized(model)
    name = name or type(model).__name__
    first: Exception | None = None
    with no_garbage_collection():
        for inputs in _ways(model, example_inputs):
            size = batch or _own_batch(model, example_inputs)
            asked = _Asked(model, inputs, loss, compute_dtype, held_dtype, size, device, name, on_host)
            try:
                taken = _taken_as_held(asked)
                graph = (taken.compiled() if compiled else taken).graph(model, name, seq_len)
            except Exception as error:
                first = first or error
                continue
            for line in graph.assumptions:
                _log.info("%s: %s", graph.name, line)
            if graph.unused:
                _log.warning("osdp: %s: %s", graph.name, _unused_line(graph))
            return graph
    assert first is not None
    raise refused(model, first) from first


def _taken_as_held(asked: _Asked) -> _Taken:
    """Where dtypes of parameters that are not gathered stop the model, it is taken without, and that is said."""
    try:
        return _taken(asked)
    except Exception as error:
        if asked.held_dtype == asked.dtype or "dtype" not in str(error).lower():
            raise
        taken = _taken(replace(asked, held_dtype=asked.dtype))
        taken.notes.append(
            f"where it asks for the dtype of a parameter that is not gathered, {asked.name} fails, as it may on ranks:"
            f" FSDP2 holds them in {asked.held_dtype} ({reason_of(error)})"
        )
        return taken


def _unused_line(graph: ModelGraph) -> str:
    numel = sum(graph.parameters[name].numel for name in graph.unused)
    return (
        f"the loss does not depend on {numel:,} of {graph.num_parameters:,} parameters, such as {graph.unused[0]}: "
        "they are held and not trained; give inputs that use them, or freeze or remove them"
    )


def _ways(model: nn.Module, example: Any) -> list[Inputs]:
    """The example at any batch size, as it is likeliest meant; see [Note: Samples]."""
    if callable(example) and not isinstance(example, Mapping):
        return [example]
    ways = [scaled_inputs(example, model=model)]
    return [*ways, scaled_inputs(example, model=model, rows=True)] if has_rows(example) else ways


def _own_batch(model: nn.Module, example: Any) -> int:
    return 2 if callable(example) and not isinstance(example, Mapping) else example_batch(example, model)


@dataclass(frozen=True)
class _Asked:
    """What is to be captured."""

    model: nn.Module
    inputs: Inputs
    loss: Callable[[Any], Tensor] | None
    dtype: str
    held_dtype: str
    batch: int
    device: Device | None
    name: str
    on_host: bool
    root_is_operator: bool = False
    not_units: Mapping[str, str] = field(default_factory=dict)  # each with the place that uses its parameters

    @property
    def blocks(self) -> list[str]:
        return [block for block in own_blocks(self.model) if block not in self.not_units]

    def watched_runner(self, mode: FakeTensorMode, short: Short | None) -> Runner:
        """A runner that says how long it will take if that is long; see [Note: Pace]."""

        def kernels() -> tuple[int, int] | None:
            return forward_kernels(lambda other: self.runner(other, short))

        return replace(self.runner(mode, short), pace=Pace(self.name, kernels))

    def runner(self, mode: FakeTensorMode, short: Short | None = None) -> Runner:
        return Runner.of(
            self.model,
            self.inputs,
            self.loss,
            self.dtype,
            mode,
            short=short,
            root_is_operator=self.root_is_operator,
            device=self.device,
            not_units=self.not_units,
            held_dtype=self.held_dtype,
        )


class _OtherUnits(Exception):
    """A capture shows that units cannot be as assumed; see [Note: Uncalled], and [Note: Used outside]."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes


def _taken(asked: _Asked) -> _Taken:
    while True:
        try:
            taken, whole = _taken_as(asked)
            if whole.used_outside:
                raise _OtherUnits(not_units={**asked.not_units, **whole.used_outside})
        except _OtherUnits as other:
            asked = replace(asked, **other.changes)
        else:
            return taken


def _taken_as(asked: _Asked) -> tuple[_Taken, RawTrace]:
    """The captures of a short copy, where the one at full depth agrees with them, else at full depth; and that one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ForkWorker[RawTrace]() as worker:
        worker.start(lambda: asked.runner(mode).check(CHECKED))
        blocks = asked.blocks
        whole = cache(lambda: worker.result(waiting_said(asked.name, f"its {len(blocks)} blocks are checked")))
        short = shortened(asked.model, blocks)
        taken = _short_taken(asked, mode, short, whole)
        if taken is None and short is not None:
            taken = _short_taken(asked, mode, shortened(asked.model, blocks, _kinds(asked, whole, blocks)), whole)
        if taken is not None:
            return taken, whole()
        try:
            return _Taken.of(asked, mode, None, whole), whole()
        except UnevenGrowth as uneven:
            return _Taken.at_one_batch(asked, mode, uneven), whole()


def _short_taken(
    asked: _Asked, mode: FakeTensorMode, short: Short | None, whole: Callable[[], RawTrace]
) -> _Taken | None:
    """None where the short copy does not run, or the capture at full depth disagrees; see [Note: Depth]."""
    if short is None:
        return None
    try:
        taken = _Taken.of(asked, mode, short, whole)
        return taken if taken.agrees_with(whole()) else None
    except _OtherUnits:
        raise
    except Exception:
        return None  # full depth works or says why not


def _kinds(asked: _Asked, whole: Callable[[], RawTrace], blocks: Sequence[str]) -> list[Hashable]:
    """What every block ran at full depth, equal for those that ran the same; empty where that cannot be told."""
    try:
        trace = fit_growth({CHECKED: whole()})
    except Exception:
        return []
    operators = {name for name, module in asked.model.named_modules() if owns_parameters(module)}
    cuts = {cut.block: cut for cut in cut_stages(trace, blocks, operators) or ()}
    return [trace.content(cuts[block]) for block in blocks] if set(blocks) <= set(cuts) else []


@dataclass
class _Taken:
    """The captures of one copy of the model, short or whole, and what is needed to read them."""

    asked: _Asked
    run: Runner
    short: Short | None
    blocks: list[str]
    operators: set[str]
    plain: GrowingTrace
    again: Recomputed
    cuts: list[Cut]
    raw: dict[int, RawTrace]
    batches: tuple[int, ...]
    notes: list[str]
    ran: tuple[StageTraces, ...] = ()  # other traces of the stages that ran than those of eager code

    @staticmethod
    def of(
        asked: _Asked,
        mode: FakeTensorMode,
        short: Short | None,
        whole: Callable[[], RawTrace],
    ) -> _Taken:
        """Traces the model; at full depth `whole` is one of the captures. What is recomputed selectively is traced
        beside the others.
        """
        run = asked.watched_runner(mode, short)
        with ForkWorker[dict[int, RawTrace] | str]() as worker:
            began = monotonic()
            raw = {BATCHES[0]: run.plain(BATCHES[0])}
            if short is not None:
                depth_said(asked.name, monotonic() - began, len(run.blocks), len(asked.blocks))
            raw |= {batch: run.plain(batch) for batch in BATCHES[1:]}
            if run.blocks:
                worker.start(partial(run.selectively, BATCHES))
            if short is None:
                raw[CHECKED] = whole()
            selectively = partial(worker.result, waiting_said(asked.name, "blocks are traced selectively recomputed"))
            return _Taken._read(asked, run, short, BATCHES, raw, selectively)

    @staticmethod
    def at_one_batch(asked: _Asked, mode: FakeTensorMode, uneven: UnevenGrowth) -> _Taken:
        """The captures at the one batch size that is asked for; see [Note: Batches] in runs.py."""
        run = asked.runner(mode)
        batches = (asked.batch,)
        raw = {asked.batch: run.plain(asked.batch)}
        taken = _Taken._read(asked, run, None, batches, raw, partial(run.selectively, batches))
        taken.notes.insert(0, f"the plan holds for batch {asked.batch} only: {uneven}")
        return taken

    @staticmethod
    def _read(
        asked: _Asked,
        run: Runner,
        short: Short | None,
        batches: tuple[int, ...],
        raw: dict[int, RawTrace],
        selectively: Callable[[], dict[int, RawTrace] | str],
    ) -> _Taken:
        operators, blocks = run.operators, list(run.blocks)
        if "" not in operators and _uncalled(run.model, next(iter(raw.values())).marks):
            raise _OtherUnits(root_is_operator=True)
        plain = fit_growth(raw)
        cuts = cut_stages(plain, blocks, operators)
        again = Recomputed()
        if cuts is None:
            turn, end = plain.backward_mark, len(plain.marks)
            blocks, cuts = [], [Cut(None, (0, turn), (turn, end))]
        elif blocks:
            again = try_recompute(run, batches, cuts, selectively)
            if asked.on_host:
                try_on_host(run, batches, cuts, again, lambda: _check_on_host(run, batches[0], plain, cuts, again))
        notes = [*next(iter(raw.values())).assumptions, *again.notes, *said_of(asked.not_units), *plain.notes]
        return _Taken(asked, run, short, blocks, operators, plain, again, cuts, raw, batches, notes)

    @cached_property
    def finer(self) -> dict[Granularity, _Taken | None]:
        """The captures with smaller units than blocks that differ from this one; see [Note: Held dtype].

        None where the model does not run so.
        """
        found: dict[Granularity, _Taken | None] = {}
        differs = {each for raw in self.raw.values() for each in raw.differs} if self.blocks and not self.ran else ()
        for granularity in sorted(differs):
            run = replace(self.run, granularity=granularity, kernels={})
            try:
                raw = {batch: run.plain(batch) for batch in self.batches}
                selectively = partial(run.selectively, self.batches)
                taken = _Taken._read(self.asked, run, self.short, self.batches, raw, selectively)
                found[granularity] = taken if taken.blocks == self.blocks else None
            except Exception as error:
                self.notes.append(f"blocks are not gathered by {granularity}: one fails ({reason_of(error)})")
                found[granularity] = None
        return found

    def compiled(self) -> _Taken:
        """The same with compiled blocks; see [Note: Compiled traces] in compiled_blocks.py."""
        if not self.blocks:
            return self
        eager = [(cut.block, self._traces(index)) for index, cut in enumerate(self.cuts)]
        found = try_compiled(self.run, self.batches, eager)
        return replace(self, ran=found.stages, notes=[*self.notes, *found.notes])

    def _traces(self, index: int) -> StageTraces:
        """Those of a stage that ran."""
        if self.ran:
            return self.ran[index]
        return StageTraces(build_trace(self.plain, self.cuts[index]), *self.again.traces(index))

    def agrees_with(self, whole: RawTrace) -> bool:
        """Whether the expanded short trace equals one capture at full depth, kernel by kernel."""
        traces = [stage.plain for stage in self._stages]
        passes = [trace.forward for trace in traces] + [trace.backward for trace in reversed(traces)]
        kernels = [[getattr(s, what) for segments in passes for s in segments] for what in ("flops", "moved")]
        size = np.array([1, CHECKED])
        return (
            _levels(traces, CHECKED) == (_mark_peaks(whole), whole.end_live)
            and [segment.mark for segments in passes for segment in segments] == whole.marks
            and (np.concatenate(kernels[0]) @ size).tolist() == whole.flops
            and (np.concatenate(kernels[1]) @ size).tolist() == whole.moved
        )

    @cached_property
    def _stages(self) -> list[TracedStage]:
        """Every stage of the full model: its block's name, and its traces."""
        names = self.short.stands_for if self.short else {}
        found: list[TracedStage] = []
        stages: list[TracedStage] = []

        def expand() -> None:
            """The blocks since the last stage outside them: as they ran, or where some were cut, list by list.

            That is the order of the full model where `agrees_with` says so.
            """
            if not names:
                stages.extend(found)
            traced = {each.block: each for each in found if each.block is not None}
            for container in dict.fromkeys(block.rpartition(".")[0] for block in traced):
                for name, stand_in in names.items():
                    if stand_in in traced and stand_in.rpartition(".")[0] == container:
                        _, plain, *others = traced[stand_in]
                        again = [trace and renamed(trace, (stand_in, name)) for trace in others]
                        stages.append(TracedStage(name, renamed(plain, (stand_in, name)), *again))
            found.clear()

        for index, cut in enumerate(self.cuts):
            plain, recomputed, selective, on_host = self._traces(index)
            if cut.block is not None:
                found.append(TracedStage(cut.block, plain, recomputed, selective, on_host))
                continue
            expand()
            differs = recomputed is not None and shape_of(recomputed, "") != shape_of(plain, "")
            stages.append(TracedStage(None, plain, recomputed if differs else None, None, None))
        expand()
        return stages

    def graph(self, model: nn.Module, name: str, seq_len: int | None) -> ModelGraph:
        parameters = _parameters(model)
        finer = {each: None if taken is None else taken._stages for each, taken in self.finer.items()}
        modules = dict(model.named_modules())
        costs = measure_operators(self.raw, self.plain, self.operators)
        short_name = self.short.name if self.short is not None else str
        canonical = {alias: first for first, p in parameters.items() for alias in (first, *p.aliases)}
        operators = {
            key: _operator(key, module, canonical, costs[short_name(key)])
            for key, module in modules.items()
            if owns_parameters(module) or (self.asked.root_is_operator and not key)
        }
        return ModelGraph(
            name=name,
            compute_dtype=self.asked.dtype,
            parameters=parameters,
            operators=operators,
            stages=numbered_stages(self._stages, modules, operators, finer),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
            input_bytes=self._input_bytes(),
            batches=(*self.batches, CHECKED) if len(self.batches) > 1 else self.batches,
            seq_len=seq_len,
            assumptions=tuple(dict.fromkeys(self.notes)),
            unused=self._unused(parameters),
            sample_elements=self._sample_elements(),
        )

    def _input_bytes(self) -> Affine:
        sizes = {batch: _tensor_bytes(self.asked.inputs(batch)) for batch in self.batches}
        (low, first), (high, second) = min(sizes.items()), max(sizes.items())
        slope = (second - first) // (high - low) if high > low else 0
        return Affine(first - slope * low, slope)

    def _sample_elements(self) -> int:
        batch = self.batches[0]
        return max(tensor.numel() for tensor in tensors_in(self.asked.inputs(batch))) // batch

    def _unused(self, parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
        """The trainable parameters that no gradient reaches: the loss does not depend on them."""
        reached = {mark.name for mark in self.plain.marks if mark.kind == "gradient"}
        short_name = self.short.name if self.short is not None else str
        return tuple(name for name, p in parameters.items() if p.trainable and short_name(name) not in reached)


def _check_on_host(run: Runner, batch: int, plain: GrowingTrace, cuts: Sequence[Cut], again: Recomputed) -> None:
    """Refuses inputs on the host where a block beside one that is there would hold it too.

    Stages' traces are joined in any mixture, but each is from a run in which all blocks are held alike. A block whose
    last operator saves its own output (a ReLU) keeps the next one's input on the device, and so does a frame around two
    blocks. Then runs in which every second block's input is on the host need more than the joined traces say.
    """
    blocks = [cut.block for cut in cuts if cut.block in again.blocks and cut.block is not None]
    for other, first in itertools.product(EVERY_RECOMPUTE, (0, 1)):
        there = {block for block in blocks[first::2] if block in again.on_host}
        how = {block: Recompute.ON_HOST if block in there else other for block in blocks}
        if not there or (other is Recompute.SELECTIVE and again.selective is None):
            continue
        traces = []
        for index, cut in enumerate(cuts):
            full, selective, on_host = again.traces(index)
            of = {Recompute.FULL: full, Recompute.SELECTIVE: selective, Recompute.ON_HOST: on_host}
            own = Recompute.FULL if cut.block is None else how.get(cut.block, Recompute.NONE)
            traces.append(of.get(own) or build_trace(plain, cut))
        said, _ = _levels(traces, batch)
        seen = _mark_peaks(run.recomputed(batch, {block: each for block, each in how.items() if each}))
        if len(said) != len(seen) or any(more > less for more, less in zip(seen, said, strict=True)):
            raise CaptureError("blocks beside it hold it too")


def _uncalled(model: nn.Module, marks: Sequence[Mark]) -> set[nn.Parameter]:
    """Parameters of modules that are neither called nor below one that is."""
    called = {mark.name for mark in marks if mark.kind == "enter"}
    below: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}

    def reached(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in called for length in range(1, len(parts) + 1))

    for name, parameter in model.named_parameters(remove_duplicate=False):
        below[reached(name.rpartition(".")[0])].add(parameter)
    return below[False] - below[True]


def _levels(traces: Sequence[Trace], batch: int) -> tuple[list[int], int]:
    """The highest level of every segment of the joined plain traces, and the level at the end."""
    level, peaks = 0, []
    passes = [trace.forward for trace in traces] + [trace.backward for trace in reversed(traces)]
    for segments in passes:
        peaks.extend(level + segment.peak_at(batch) for segment in segments)
        if segments:
            level += segments[-1].end.at(batch)
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
        shape = tuple(parameter.shape) or (1,)  # as osdp.runtime.scalars holds one without dimensions
        parameters[first] = Parameter(first, shape, dtype, parameter.requires_grad, tuple(aliases))
    return parameters


def _operator(name: str, module: nn.Module, canonical: Mapping[str, str], costs: OperatorCosts) -> Operator:
    prefix = f"{name}." if name else ""
    owned = tuple(canonical[prefix + key] for key, value in module._parameters.items() if value is not None)
    return Operator(name, type(module).__name__, owned, split_dim=split_dim(module), **costs.__dict__)


def _tensor_bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(tree))


__all__ = ["CaptureError", "capture", "scaled_inputs"]
