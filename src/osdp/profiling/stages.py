"""The model's own stages on the device: forward and backward, plain and recomputed, at a few batch sizes.

[Note: Timed stages]
Capture cuts a step into stages at marks (see [Note: Stage] in osdp.model.graph). Here the same hooks feed a clock in
place of the recorder, while the model runs on real tensors in the compute dtype, without FSDP2, on all ranks at once.
Large models are cut in depth as in [Note: Depth] of osdp.model.shorten: of a run of equal blocks four are run. Small
ones are run whole: where ranks share CPUs, short passes take less than their part of long ones. Stages of one
signature are averaged. What is typical of a pass (see `typical`, and [Note: Processors]) is divided over the stages in
the proportion of their means, so that the stages' seconds add up to what a pass took. A larger batch never takes less:
where noise says so, both get the mean.

[Note: Batches]
Few samples are computed at a worse rate than many: products have few rows, and each kernel is launched. The rate
settles at a batch that is not known before. Plans take larger batches than any that was timed, so an error in the last
two times grows with the distance: with times at 1, 2 and 4 samples a step of 23 was predicted a third too long. Unless
sizes are given, they are doubled until a sample takes about what it took at a quarter of the size.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from osdp._torch import tree_map_only
from osdp.cluster import TimedStage
from osdp.errors import OsdpError, UsageError
from osdp.model.fake import DTYPES
from osdp.model.graph import Mark, ModelGraph, Stage
from osdp.model.selective import checkpointed
from osdp.model.shorten import shortened
from osdp.model.source import ModelSource
from osdp.model.stages import Cut, GrowingTrace, cut_stages
from osdp.model.structure import own_blocks, owns_parameters
from osdp.model.trace import Hooks, Recorder
from osdp.profiling.bench import Bench
from osdp.profiling.rounds import typical
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.runtime.initialize import initialize
from osdp.training.failures import is_out_of_memory

_LEAST_FORWARD = 0.7  # of the plain one, which saves what the recomputed one does not, takes a recomputed one at least
_TURNS = 2  # in a round
_FIRST = 1, 2, 4  # see [Note: Batches]; larger ones have one turn in a round
_SETTLED = 0.1  # of a sample's seconds: so much less than at a quarter of the batch is still a better rate
_LONGEST = 1 / 60  # of the profile's time takes a pass of the largest batch, about
_WHOLE_PARAMETERS = 50_000_000  # up to these a model is run at its full depth
_VALUES = 0.02  # the spread of weights where a model cannot initialise its own


Run = Callable[[], NDArray[Any]]  # seconds of every stage, a row of forward and backward for each


class Clock(Recorder):
    """Takes the time at every mark, where the recorder counts kernels: the bench's, or a device's own."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(set())
        self._calls, self._now = bench.calls, bench.by_processor
        self._times: list[Any] = []

    def mark(self, kind: str, name: str, recomputed: bool = False) -> None:
        self.trace.marks.append(Mark(kind, name, recomputed))
        self._times.append(self._calls.moment() if self._calls.has_streams else self._now())

    def seconds(self) -> list[float]:
        """Of every mark, since the first."""
        first = self._times[0]
        self._calls.synchronize()
        return [self._calls.seconds_between(first, moment) for moment in self._times]


@dataclass(frozen=True)
class TimedStages:
    stages: tuple[TimedStage, ...]
    batches: tuple[int, ...]
    stopped: str  # why no larger batch was timed; empty where all were


@dataclass(frozen=True)
class Subject:
    """A model that runs, perhaps with less depth; `stand_in` gives the block that is run for a block of the graph."""

    model: nn.Module
    stand_in: Mapping[str, str]


class StageRounds:
    """Every distinct stage of the graph, plain and recomputed in turn; see [Note: Timed stages]."""

    def __init__(
        self,
        bench: Bench,
        source: ModelSource,
        graph: ModelGraph,
        *,
        batches: Sequence[int] | None = None,
        memory_bytes: int,
    ) -> None:
        """Times these batches, up to the first that does not fit; by default as in [Note: Batches]."""
        self._bench, self._source, self._graph = bench, source, graph
        self._subject = make_subject(source, graph, bench.device)
        self._order = [how for how in EVERY_RECOMPUTE if not how or any(_has(stage, how) for stage in graph.blocks)]
        self._runs: dict[int, list[Run]] = {}
        self._taken: dict[int, list[list[NDArray[Any]]]] = {}  # by batch: of every turn, of every run
        self._passes: dict[int, float] = {}  # of the slowest rank, by batch
        self._stopped = ""
        for batch in batches or _FIRST:
            if not self._admits(batch, memory_bytes):
                break
        longest = bench.budget_seconds * _LONGEST
        while not batches and not self._stopped and (following := larger_batch(self._passes, longest)):
            if not self._admits(following, memory_bytes):
                self._stopped = ""  # nobody asked for this one
                break
        if not self._taken:
            raise OsdpError(f"no stage could be timed: {self._stopped}; give a smaller --batches or --seq-len")

    def _admits(self, batch: int, memory_bytes: int) -> bool:
        """Whether a batch of this size can be run."""
        need = _needed_bytes(self._graph, self._subject, batch)
        if need > memory_bytes:
            self._stopped = f"batch {batch} needs about {need / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB"
            return False
        self._bench.watch(f"the model's stages at batch {batch}")
        runs = []
        for run in self._runs_of(batch):
            first, second = (_tried(self._bench, run) for _ in range(2))  # the first warms up
            if first is None or second is None:
                self._stopped = f"batch {batch} ran out of memory"
                return False
            (slowest,) = self._bench.slowest(min(float(first.sum()), float(second.sum())))
            self._passes.setdefault(batch, slowest)  # of the first run, which is the plain one
            steps = self._bench.steps_of_a_try(float(second.sum()))
            runs.append(functools.partial(self._bench.computed, steps, run))
        self._runs[batch], self._taken[batch] = runs, []
        return True

    def _runs_of(self, batch: int) -> list[Run]:
        bench, subject, source = self._bench, self._subject, self._source
        torch.manual_seed(bench.world.rank)
        dtype = DTYPES[self._graph.compute_dtype]
        args, kwargs = random_inputs(source, subject.model, batch, bench.device, dtype)
        blocks = list(dict.fromkeys(subject.stand_in.values()))
        return [
            functools.partial(_step, bench, subject.model, args, kwargs, source.loss, blocks, again)
            for again in self._order
        ]

    def round(self) -> None:
        for turn in range(_TURNS):
            for batch, taken in self._taken.items():
                if turn and batch > max(_FIRST):
                    continue
                taken.append([run() for run in self._runs[batch]])

    def timed(self) -> TimedStages:
        """By all rounds so far."""
        found = {}
        for batch, turns in self._taken.items():
            runs = zip(self._order, _typical(self._bench, turns), strict=True)
            found[batch] = {again: _of_graph(self._graph, self._subject, run, again) for again, run in runs}
        return TimedStages(tuple(_collected(self._graph, found)), tuple(found), self._stopped)


def larger_batch(passes: Mapping[int, float], longest_seconds: float) -> int | None:
    """The next batch size to time, given the seconds of those before; None where the rate has settled or time is short.

    See [Note: Batches].
    """
    largest = max(passes)
    before = passes.get(largest // 4)
    if before is not None and passes[largest] / largest > (1 - _SETTLED) * before / (largest // 4):
        return None
    return 2 * largest if 2 * passes[largest] <= longest_seconds else None


def make_subject(source: ModelSource, graph: ModelGraph, device: torch.device) -> Subject:
    """The model in the compute dtype with weights and memory; cut to few blocks if it is large and has any."""
    model = source.build_on_meta()
    blocks = [stage.name for stage in graph.stages if stage.is_block]
    large = sum(parameter.numel() for parameter in model.parameters()) > _WHOLE_PARAMETERS
    short = shortened(model, own_blocks(model)) if blocks and large else None
    stand_in = {block: block for block in blocks}
    if short is not None:
        stand_in = dict(short.stands_for)
        short.cut(model)
    _give_values(model, device)
    dtype = DTYPES[graph.compute_dtype]
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return Subject(model, stand_in)


@torch.no_grad()
def _give_values(model: nn.Module, device: torch.device) -> None:
    """The model's own first weights; where it has no way to make them, small random ones: only the time matters."""
    try:
        initialize(model, device=device)
    except UsageError:
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(0.0, _VALUES) if tensor.is_floating_point() else tensor.zero_()


def random_inputs(source: ModelSource, model: nn.Module, batch: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs of the model's shapes: tokens that it knows, normal numbers, class 0."""
    known = _known_tokens(model)

    def value(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=dtype, device=device)
        if tensor.dtype is torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool, device=device)
        most = known if tensor.dim() > 1 else 1
        return torch.randint(most, tensor.shape, dtype=tensor.dtype, device=device)

    return tree_map_only(Tensor, value, source.inputs(batch))


def _known_tokens(model: nn.Module) -> int:
    """A number of tokens that every table has."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    stated = getattr(config, "vocab_size", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return stated if isinstance(stated, int) else min(tables, default=2)


def _typical(bench: Bench, turns: Sequence[Sequence[NDArray[Any]]]) -> NDArray[Any]:
    """Of each run's passes what is typical of the slowest rank, divided over stages as they are on the mean."""
    own = np.array(turns)  # turns, runs, stages, passes
    passes, mean = (
        np.array(bench.slowest(*each.flatten().tolist())).reshape(each.shape)
        for each in (typical(own.sum(axis=2)), own.mean(axis=0))
    )
    return mean / np.maximum(mean.sum(axis=1, keepdims=True), 1e-12) * passes[:, None] * bench.clock_factor


def _tried(bench: Bench, run: Run) -> NDArray[Any] | None:
    """A step on all ranks; None on all where memory is out on some."""
    seconds: NDArray[Any] | None = None
    try:
        seconds = run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return None if bench.slowest(float(seconds is None))[0] else seconds


def _step(
    bench: Bench,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    loss: Callable[[Any], Tensor],
    blocks: list[str],
    again: Recompute,
) -> NDArray[Any]:
    """Seconds of every stage that is run, in forward and in backward."""
    watched, operators = _watched(model, blocks)
    clock = Clock(bench)
    hooks = Hooks(clock, watched)
    recomputed = [model.get_submodule(block) for block in blocks] if again else []
    for module in recomputed:
        module.forward = checkpointed(module.forward, again, preserve_rng_state=False)  # type: ignore[method-assign]
    try:
        clock.mark("begin", "")
        scalar = loss(model(*args, **kwargs))
        clock.trace.backward_mark = len(clock.trace.marks)
        clock.mark("turn", "")
        hooks.in_backward = True
        scalar.backward()
        clock.mark("end", "")
        hooks.flush(model)
    finally:
        hooks.remove()
        for module in recomputed:
            del module.forward
        model.zero_grad(set_to_none=True)
    at = clock.seconds()
    at.append(at[-1])
    cuts = _cuts(clock, blocks, operators)
    return np.array([[at[stop] - at[start] for start, stop in (cut.forward, cut.backward)] for cut in cuts])


def _watched(model: nn.Module, blocks: Sequence[str]) -> tuple[dict[str, nn.Module], set[str]]:
    """Blocks and the operators outside of them: what stages are cut at. Inside a block every hook would cost time."""
    inside = tuple(f"{block}." for block in blocks)
    outside = {
        name
        for name, module in model.named_modules()
        if owns_parameters(module) and name not in blocks and not name.startswith(inside)
    }
    modules = dict(model.named_modules())
    return {name: modules[name] for name in modules if name in outside or name in blocks}, outside


def _cuts(clock: Clock, blocks: list[str], operators: set[str]) -> list[Cut]:
    marks, turn = tuple(clock.trace.marks), clock.trace.backward_mark
    if blocks:
        none = np.zeros((0, 2), dtype=np.int64)
        found = cut_stages(GrowingTrace(marks, (), turn, none, none, none, none, none, none), blocks, operators)
        if found is None:
            raise OsdpError("the model's blocks run in another order than when it was captured; report its name")
        return found
    return [Cut(None, (0, turn), (turn, len(marks)))]


def _of_graph(graph: ModelGraph, subject: Subject, run: NDArray[Any], again: Recompute) -> NDArray[Any]:
    """A row for every stage of the graph, from those that were run; alike ones are averaged over all that were."""
    places = _places(graph, subject)
    if max(places) + 1 != len(run):
        raise OsdpError(f"{len(run)} stages ran where capture found {max(places) + 1}; the model cannot be timed")
    kinds: dict[str, set[int]] = {}
    for stage, place in zip(graph.stages, places, strict=True):
        kinds.setdefault(stage.trace(again).signature, set()).add(place)
    return np.stack([run[sorted(kinds[stage.trace(again).signature])].mean(axis=0) for stage in graph.stages])


def _places(graph: ModelGraph, subject: Subject) -> list[int]:
    """For each stage of the graph the number of the stage that is run for it."""
    places: list[int] = []
    blocks: dict[str, int] = {}
    following = 0
    for stage in graph.stages:
        name = subject.stand_in.get(stage.name) if stage.is_block else None
        if name is not None and name in blocks:
            places.append(blocks[name])
            continue
        if name is not None:
            blocks[name] = following
        places.append(following)
        following += 1
    return places


def _needed_bytes(graph: ModelGraph, subject: Subject, batch: int) -> int:
    """About what a step of the subject holds: its parameters, their gradients, and what is saved for backward."""
    saved: dict[int, int] = {}
    for stage, place in zip(graph.stages, _places(graph, subject), strict=True):
        saved[place] = max(0, stage.plain.forward_delta.at(batch))
    return sum(saved.values()) + 2 * sum(p.numel() * p.element_size() for p in subject.model.parameters())


def rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """The closest times of which none is shorter than that of a smaller batch: where one was, both get their mean."""
    runs: list[list[float]] = []
    for each in seconds:
        runs.append([each])
        while len(runs) > 1 and statistics.fmean(runs[-2]) > statistics.fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    return tuple(statistics.fmean(run) for run in runs for _ in run)


def _has(stage: Stage, how: Recompute) -> bool:
    """Whether a stage has a trace of its own for this."""
    return not how or (stage.selective if how is Recompute.SELECTIVE else stage.recomputed) is not None


def _least_forward(how: Recompute) -> float:
    """Of the plain forward what a recomputed backward takes beside its own kernels at least."""
    return _LEAST_FORWARD if how is Recompute.FULL else 0.0


def _collected(graph: ModelGraph, found: Mapping[int, Mapping[Recompute, NDArray[Any]]]) -> list[TimedStage]:
    """One entry for each signature; where the recomputed run has the plain one's kernels, the plain one's."""
    batches = tuple(found)
    timed: dict[str, TimedStage] = {}
    for again in EVERY_RECOMPUTE:
        for index, stage in enumerate(graph.stages):
            trace = stage.trace(again)
            if not _has(stage, again) or trace.signature in timed:
                continue
            rows = [found[batch][again][index] for batch in batches]
            if again:  # a recomputed backward has a forward in it: what takes less is noise
                plain = [found[batch][Recompute.NONE][index] for batch in batches]
                least = [_least_forward(again) * forward + backward for forward, backward in plain]
                rows = [(forward, max(low, backward)) for low, (forward, backward) in zip(least, rows, strict=True)]
            forward, backward = (rising([float(row[column]) for row in rows]) for column in (0, 1))
            name = f"{stage.name}, {again.words}" if again else stage.name
            timed[trace.signature] = TimedStage(trace.signature, name, batches, forward, backward)
    return list(timed.values())
