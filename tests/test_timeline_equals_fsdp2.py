"""Claim: the planner's timeline is, to the byte and at every mark, what the real FSDP2 allocates.

The truth is a dry run: one process plays rank 0 of a fake world on fake tensors, and FSDP2 itself runs the second
training step. Both sides are cut at the same marks (see [Note: Trace] in osdp.model.graph). Per segment

    highest level at an allocation <= predicted <= max(that, the level at the mark)

so a prediction can be neither below what is allocated nor above what is ever alive there. The allowance of 8 bytes is
the loss and its gradient, two scalars that live outside the model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import pytest
from planned import how
from selection import one_in
from small_models import captured, source

from osdp.answer import plan_units
from osdp.cluster import Cluster
from osdp.cost.layout import Layout, Variant, Variants
from osdp.cost.lifetimes import chunk_bytes, stepping_bytes
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import OPTIMIZERS, Training
from osdp.cost.units import OPERATORS, PARTS, WHOLE, Option
from osdp.model.graph import Mark, ModelGraph
from osdp.model.trace import RawTrace
from osdp.planfile import Depth, Plan, unpriced_plan
from osdp.recompute import Recompute
from osdp.runtime.dryrun import dry_run
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE, ShardingMode
from osdp.training.optimizer import optimizer_of

# An operator such as a projection whose output is viewed by its caller is a unit of its own at operator granularity;
# FSDP2 then warns, for every such module, that it "returned a view tensor". It is about in-place edits of the output,
# which none of these models makes.
pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")

SCALARS = 8  # the loss and its gradient, fp32
BATCH = 2
NONE, ALL, ALTERNATING = (False,), (True,), (True, False)
SELECTIVE, MIXED = (Recompute.SELECTIVE,), (Recompute.SELECTIVE, False, True, Recompute.SELECTIVE)
EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)


@dataclass(frozen=True)
class Case:
    """One plan to compare: modes go round over the units, recompute over the blocks.

    `known` are errors that are understood and not yet mended (see docs/cost-model.md): the most bytes by which a
    segment, and the peak, are off.
    """

    modes: tuple[str, ...] = (FREE,)
    model: str = "gpt"
    granularity: str = WHOLE
    recompute: tuple[bool | Recompute, ...] = NONE
    precision: str = "bf16"
    reduce_dtype: str | None = None
    optimizer: str = "adamw"
    world: str = "2x2"
    device: str = "A100-80GB"
    splits: tuple[tuple[int, int], ...] = ((1, 1),)
    accumulation: int = 1
    reduce_once: tuple[bool, ...] = NONE
    all_reduce_once: tuple[bool, ...] = NONE
    gather_once: tuple[bool, ...] = NONE
    prefetch: Depth = 1
    known: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        changed = [
            value
            for name, value in vars(self).items()
            if name not in ("modes", "known") and value != getattr(Case, name)
        ]
        words = [value if isinstance(value, str) else {ALL: "all"}.get(value, str(value)) for value in changed]
        modes = "every-mode" if self.modes == EVERY_MODE else "+".join(self.modes)
        return "-".join([modes, *words])

    batch: int = BATCH

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(f"{self.world}x{self.device}")

    @property
    def training(self) -> Training:
        training = Training.of(self.precision, self.optimizer, self.reduce_dtype)
        return replace(training, accumulation=self.accumulation)


class Row(NamedTuple):
    """A segment: its mark, the highest level at an allocation in it (0 without one), and the level at the mark."""

    mark: Mark
    allocated: int
    at_mark: int


def laid_out(case: Case) -> tuple[Layout, list[Option]]:
    on_host = Recompute.ON_HOST in case.recompute
    precision = case.training.precision
    graph = captured(case.model, precision.compute_dtype, case.device, held_dtype=precision.held_dtype, on_host=on_host)
    variants, chosen, block = Variants(graph), [], 0
    for index, stage in enumerate(graph.stages):
        known = {variant.granularity for variant in variants.of(index)}
        wanted = next(g for g in (case.granularity, WHOLE, OPERATORS) if g in known)
        if stage.is_block:
            assert wanted == case.granularity, f"{stage.name} has no {case.granularity}: it has {known}"
        again = case.recompute[block % len(case.recompute)] if stage.is_block else any(case.recompute)
        block += stage.is_block
        chosen.append(Variant(wanted, how(again), case.prefetch if stage.is_block else 1))
    layout = variants.layout(chosen)
    modes, once, splits = cycle(case.modes), cycle(case.reduce_once), cycle(case.splits)
    two_levels, across = cycle((case.cluster.has_two_levels, False)), cycle(case.all_reduce_once)
    stays = cycle(case.gather_once)
    options = []
    for unit in layout.units:
        slices, sharded = next(splits) if unit.split_dim >= 0 and len(unit.modules) == 1 else (1, 1)
        mode = next(modes)
        late = ShardingMode(mode).is_reduced_across and next(across)
        gathered = ShardingMode(mode).is_kept and slices == 1 and next(stays)
        options.append(Option(mode, slices, sharded, next(once), next(two_levels), late, gather_once=gathered))
    return layout, options


def plan_of(case: Case, layout: Layout, options: list[Option]) -> Plan:
    return unpriced_plan(
        case.model,
        plan_units(layout, options),
        case.cluster,
        precision=case.precision,
        reduce_dtype=case.training.reduce_dtype,
        optimizer=case.optimizer,
        batch_size=case.batch,
        accumulation=case.accumulation,
    )


def measured(case: Case, plan: Plan) -> tuple[list[Row], Row]:
    """What FSDP2 did, segment by segment, and its optimizer step."""
    model = source(case.model)
    graph = captured(case.model, case.training.precision.compute_dtype, case.device)
    names = entered(graph)
    raw: RawTrace = dry_run(
        model.build,
        model.inputs,
        plan,
        loss=model.loss,
        watched=lambda module: {name: each for name, each in module.named_modules() if name in names},
        optimizer=partial(optimizer_of, case.optimizer, lr=1e-3),
    ).trace
    return rows_of(raw, case.accumulation)


def entered(graph: ModelGraph) -> set[str]:
    """The modules that the trace marks: all that a unit may be made of."""
    segments = [segment for stage in graph.stages for segment in stage.plain.forward]
    return {segment.mark.name for segment in segments if segment.mark.kind == "enter"}


def rows_of(raw: RawTrace, accumulation: int) -> tuple[list[Row], Row]:
    """A step's trace, segment by segment, and its optimizer step."""
    stops = [*raw.mark_kernel[1:], len(raw.live)]
    rows = [
        Row(mark, max(raw.live[start:stop], default=0), level)
        for mark, start, stop, level in zip(raw.marks, raw.mark_kernel, stops, raw.mark_live, strict=True)
    ]
    *steps, optimizer = [row for row in rows if row.mark.kind != "end"]
    assert optimizer.mark.kind == "optimizer"
    return highest_of(steps, accumulation), optimizer


def highest_of(rows: list[Row], micro_batches: int) -> list[Row]:
    """The rows of micro-batches as one: the timeline has the most that any of them needs."""
    each = [
        rows[start : start + len(rows) // micro_batches] for start in range(0, len(rows), len(rows) // micro_batches)
    ]
    assert all([row.mark for row in one] == [row.mark for row in each[0]] for one in each)
    return [
        Row(alike[0].mark, max(row.allocated for row in alike), max(row.at_mark for row in alike))
        for alike in zip(*each, strict=True)
    ]


def predicted(timeline: Timeline) -> tuple[list[tuple[Mark, int]], int]:
    """The timeline at the marks that a real step has: one row for each, and the optimizer's bytes.

    A real step has no gradient marks, and what the trace puts after its end FSDP2 does before: both join the segment
    before them.
    """
    layout, total = timeline.layout, timeline.total
    passes = [staged.trace.forward for staged in layout.staged]
    passes += [staged.trace.backward for staged in reversed(layout.staged)]
    rows: list[tuple[Mark, int]] = []
    ended = False
    for stage_pass, segments in enumerate(passes):
        for index, segment in enumerate(segments):
            first = timeline.starts[stage_pass] + 3 * index
            value = int(total[first : first + 3].max())
            ended = ended or segment.mark.kind == "end"
            if ended or segment.mark.kind == "gradient":
                rows[-1] = rows[-1][0], max(rows[-1][1], value)
            else:
                rows.append((segment.mark, value))
    return rows, int(total[-1])


def described(mark: Mark) -> str:
    return f"{mark.kind} {mark.name}{' again' if mark.recomputed else ''}".strip()


def differences(rows: list[Row], expected: list[tuple[Mark, int]], allowed: int = SCALARS) -> list[str]:
    found = []
    for number, (row, (_, value)) in enumerate(zip(rows, expected, strict=True)):
        upper = max(row.allocated, row.at_mark)
        if row.allocated and value < row.allocated - allowed:
            found.append(f"{number} {described(row.mark)}: predicted {value}, {row.allocated - value} too little")
        elif value > upper + allowed:
            found.append(f"{number} {described(row.mark)}: predicted {value}, {value - upper} too much")
    return found


MODES_ALONE = [Case((mode,)) for mode in EVERY_MODE]
MIXTURES = [
    Case(EVERY_MODE),
    Case((KEEP, FREE, REPLICATE)),
    Case((REPLICATE, FREE_IN_NODE, FREE_TO_NODE)),
    Case((KEEP_IN_NODE, FREE), model="gpt-untied"),
    Case((REPLICATE, FREE), model="gpt-untied"),
]
PRECISION_CASES = [
    Case(precision="fp32"),
    Case(EVERY_MODE, precision="fp32"),
    Case(precision="pure-bf16"),
    Case((KEEP, FREE, REPLICATE), precision="fp16", device="V100-32GB"),
    Case(EVERY_MODE, precision="pure-bf16"),
    Case(reduce_dtype="bf16"),
    Case(EVERY_MODE, reduce_dtype="bf16"),
    Case((KEEP, REPLICATE), precision="pure-bf16", reduce_dtype="fp32"),
]
GRANULARITY_CASES = [
    Case(granularity=OPERATORS),
    Case((KEEP, FREE_TO_NODE, REPLICATE), granularity=OPERATORS),
    Case(EVERY_MODE, granularity=OPERATORS, recompute=ALTERNATING),
    Case(recompute=SELECTIVE),
    Case(EVERY_MODE, recompute=MIXED),
    Case(EVERY_MODE, recompute=MIXED, device="CPU"),
    Case((KEEP, FREE), model="llama", recompute=MIXED, accumulation=2),
    Case((FREE, KEEP), model="bert", recompute=SELECTIVE),
    Case((FREE, KEEP, REPLICATE), model="vit", precision="fp32", recompute=MIXED),
    Case(model="llama", granularity=PARTS),
    Case((FREE, KEEP, REPLICATE), model="llama", granularity=PARTS),
    Case(EVERY_MODE, model="llama", granularity=PARTS, recompute=ALTERNATING),
    Case((KEEP, FREE, FREE_IN_NODE), model="llama", granularity=OPERATORS),
]
RECOMPUTE_CASES = [
    Case(recompute=ALL),
    Case((KEEP,), recompute=ALL),
    Case((REPLICATE,), recompute=ALL),
    Case(EVERY_MODE, recompute=ALL),
    Case(recompute=ALTERNATING),
    Case((KEEP, FREE), model="llama", granularity=PARTS, recompute=ALL),
    Case((FREE, REPLICATE, KEEP), granularity=OPERATORS, recompute=ALL),
]
OPTIMIZER_CASES = [
    Case((KEEP, FREE, REPLICATE), optimizer=name)
    for name, cost in OPTIMIZERS.items()
    if name != "adamw" and not cost.chunk_temporaries  # those that step by chunks have a test of their own
]
WORLD_CASES = [
    Case((FREE, KEEP, REPLICATE), world="1x4"),
    Case(world="1x3", model="gpt-uneven"),
    Case((FREE, KEEP, REPLICATE), world="1x3", model="gpt-uneven", granularity=OPERATORS),
    Case(EVERY_MODE, world="4x2"),
    Case((FREE_TO_NODE, KEEP_IN_NODE), world="4x2", model="llama", granularity=PARTS),
]
MODEL_CASES = [
    Case((FREE, KEEP, REPLICATE), model="llama"),
    Case((FREE, KEEP, REPLICATE), model="llama-tied"),
    Case((FREE, KEEP, REPLICATE), model="bert"),
    Case((FREE, KEEP), model="bert", granularity=PARTS, recompute=ALTERNATING),
    # its second forwards end before backward reaches their last operator: nothing is to be gathered from there
    Case((FREE, KEEP), model="bert", granularity=OPERATORS, recompute=ALL),
    Case((FREE, KEEP, REPLICATE), model="gpt2"),
    Case((FREE, KEEP), model="gpt2", granularity=OPERATORS),
    # asks for the dtype of a weight that is not gathered; see [Note: Held dtype] in osdp.model.held_dtype
    Case((FREE, KEEP, REPLICATE), model="vit"),
    Case((FREE, KEEP, REPLICATE), model="vit", precision="fp32", recompute=ALL),
    Case((FREE, KEEP, REPLICATE), model="t5"),
    Case((FREE, KEEP), model="gpt-pyramid"),
    # gathered by operators it computes more in fp32; its position bias, and a gradient's cast, are counted too long
    Case(model="t5", granularity=OPERATORS, known=(4736, 0)),
]
CARRIED_CASES = [  # on gloo, where the runtime carries the collectives itself
    *(replace(case, device="CPU") for case in (*MODES_ALONE, *MIXTURES, *PRECISION_CASES, *WORLD_CASES)),
    Case(EVERY_MODE, granularity=OPERATORS, recompute=ALTERNATING, device="CPU"),
    Case(EVERY_MODE, model="llama", granularity=PARTS, recompute=ALTERNATING, device="CPU"),
    Case((FREE, KEEP, REPLICATE), model="t5", device="CPU"),
    Case((FREE, KEEP, REPLICATE), model="llama-tied", device="CPU", precision="fp32"),
]
ACCUMULATION_CASES = [
    Case((REPLICATE, KEEP_IN_NODE, FREE), accumulation=2),
    Case(EVERY_MODE, accumulation=2, reduce_dtype="bf16"),
    Case(EVERY_MODE, accumulation=3, device="CPU"),
]
IN_NODE = (FREE_IN_NODE, KEEP_IN_NODE)
LATE = {"all_reduce_once": ALL}
DEFERRED_CASES = [  # reduced in the node at every micro-batch, across nodes in the last one
    *(Case(IN_NODE, accumulation=n, device=d, **LATE) for n in (2, 3) for d in ("A100-80GB", "CPU")),
    *(Case(IN_NODE, accumulation=3, reduce_dtype="bf16", device=d, **LATE) for d in ("A100-80GB", "CPU")),
    Case(IN_NODE, accumulation=2, reduce_dtype="bf16", device="CPU", **LATE),
    *(
        Case(IN_NODE, precision="pure-bf16", reduce_dtype="fp32", accumulation=3, device=d, **LATE)
        for d in ("A100-80GB", "CPU")
    ),
    Case((KEEP_IN_NODE, FREE, FREE_IN_NODE), accumulation=2, granularity=OPERATORS, recompute=ALTERNATING, **LATE),
    Case(EVERY_MODE, model="llama", accumulation=3, all_reduce_once=ALTERNATING, device="CPU", precision="fp32"),
    Case(EVERY_MODE, model="llama", accumulation=3, all_reduce_once=ALTERNATING, precision="fp32"),
    Case(IN_NODE, model="idle-operators", accumulation=2, precision="fp32", **LATE),
    Case(IN_NODE, model="stacked", accumulation=2, **LATE),
]
STACKED_CASES = [  # sharded along another dimension than the first; see [Note: Shard dimension]
    Case(model="stacked"),
    Case(EVERY_MODE, model="stacked", granularity=OPERATORS, recompute=ALTERNATING),
    Case(EVERY_MODE, model="stacked", world="2x3", reduce_dtype="bf16"),
    Case((KEEP, FREE_IN_NODE, FREE), model="stacked", granularity=OPERATORS, device="CPU"),
    Case((FREE, KEEP_IN_NODE), model="stacked", accumulation=2),
]
IDLE_CASES = [  # operators and a tower without gradients; see [Note: Left at the end]
    Case(model="idle-operators", precision="fp32"),
    Case(model="idle-operators", precision="fp32", device="CPU"),
    Case((REPLICATE,), model="idle-operators", device="CPU"),
    # the gather in vain is counted where the first micro-batch has it, and for a moment at the end what gives way
    Case((KEEP, FREE), model="idle-operators", device="CPU", accumulation=2, known=(64, 0)),
    Case((KEEP,), model="idle-tower", granularity=OPERATORS, known=(1278, 0)),
    Case((FREE, KEEP, REPLICATE), model="idle-tower", granularity=OPERATORS, precision="fp32", device="CPU"),
    # the model itself is a unit, which backward reaches behind all blocks
    Case((FREE,), model="used-behind"),
    Case((KEEP, FREE, REPLICATE), model="used-behind", device="CPU", recompute=ALTERNATING),
]
DEEP = {"granularity": OPERATORS, "prefetch": 2}
DEEP_CASES = [  # two gathers are issued ahead within a block; see [Note: Depth] in osdp.cost.gather_order
    *(Case(device=d, **DEEP) for d in ("A100-80GB", "CPU")),
    *(Case(EVERY_MODE, device=d, recompute=ALTERNATING, **DEEP) for d in ("A100-80GB", "CPU")),
    Case(recompute=ALL, **DEEP),
    Case((FREE, REPLICATE, KEEP), recompute=ALL, precision="fp32", device="CPU", **DEEP),
    Case((KEEP, FREE, FREE_IN_NODE), model="llama", **DEEP),
    Case((FREE_TO_NODE, FREE), model="llama", recompute=ALTERNATING, world="4x2", accumulation=2, **DEEP),
    Case((FREE, KEEP), model="bert", recompute=ALL, **DEEP),
    Case((FREE, KEEP), model="gpt2", device="CPU", **DEEP),
    Case(world="1x3", model="gpt-uneven", **DEEP),
    Case(EVERY_MODE, model="stacked", recompute=ALTERNATING, **DEEP),
    Case((FREE, KEEP, REPLICATE), model="idle-tower", precision="fp32", device="CPU", **DEEP),
]
SPLIT_CASES = [
    # A slice's gather and that of the unit after its operator are counted side by side: too much in some segments.
    Case(model="gpt-untied", granularity=OPERATORS, splits=((2, 2),), known=(14584, 6440)),
    Case((KEEP,), model="gpt-untied", granularity=OPERATORS, splits=((2, 2),), known=(18808, 0)),
]
KINDS = (
    ACCUMULATION_CASES,
    DEFERRED_CASES,
    STACKED_CASES,
    IDLE_CASES,
    SPLIT_CASES,
    DEEP_CASES,
    CARRIED_CASES,
    MODES_ALONE,
    MIXTURES,
    PRECISION_CASES,
    GRANULARITY_CASES,
    RECOMPUTE_CASES,
    OPTIMIZER_CASES,
    WORLD_CASES,
    MODEL_CASES,
)
CASES = [case for kind in KINDS for case in one_in(3, kind, ids=str, always=lambda case: case.known != (0, 0))]


@pytest.mark.parametrize("case", CASES)
def test_timeline_equals_fsdp2(case: Case) -> None:
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    expected, optimizer_bytes = predicted(timeline)
    rows, optimizer = measured(case, plan_of(case, layout, options))

    assert [described(row.mark) for row in rows] == [described(mark) for mark, _ in expected]
    segment, peak = case.known
    assert not differences(rows, expected, SCALARS + segment)
    assert bool(differences(rows, expected)) == bool(segment)  # an error that is mended is no longer known
    stepping = max(optimizer.allocated, optimizer.at_mark)
    assert abs(optimizer_bytes - stepping) <= SCALARS + peak
    highest = max(max(row.allocated for row in rows), stepping)
    assert abs(timeline.peak_bytes - highest) <= SCALARS + peak


SLICED = {"granularity": OPERATORS, "precision": "fp32"}
SLICED_CASES = [
    Case(model="gpt-untied", device="CPU", splits=((8, 8),), recompute=ALL, **SLICED),
    Case((FREE_TO_NODE,), model="llama", device="CPU", splits=((8, 8),), **SLICED),
    Case((FREE_TO_NODE,), model="gpt-untied", splits=((4, 4),), recompute=ALL, **SLICED),
    Case((FREE_IN_NODE,), model="gpt-untied", splits=((4, 2),), recompute=ALL, accumulation=2, **SLICED),
    Case((REPLICATE,), model="llama", splits=((4, 4),), accumulation=2, **SLICED),
    Case((KEEP,), model="gpt2", device="CPU", splits=((4, 2),), **SLICED),
]


@pytest.mark.parametrize("case", one_in(3, SLICED_CASES, ids=str))
def test_slices_need_no_more_than_is_predicted_and_little_less(case: Case) -> None:
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    expected, _ = predicted(timeline)
    rows, _ = measured(case, plan_of(case, layout, options))
    assert not [found for found in differences(rows, expected) if found.endswith("too little")]
    highest = max(row.allocated for row in rows)
    assert max(value for _, value in expected) <= 1.05 * highest


def drawn_in_slices(seed: int) -> Case:
    draw = random.Random(seed)
    return Case(
        draw.choice([*((mode,) for mode in EVERY_MODE), EVERY_MODE]),
        model=draw.choice(["gpt-untied", "llama", "gpt2", "bert", "vit"]),
        device=draw.choice(["CPU", "A100-80GB"]),
        splits=(draw.choice([(2, 2), (4, 4), (8, 8), (4, 2)]),),
        recompute=draw.choice([NONE, ALL]),
        accumulation=draw.choice([1, 2]),
        precision=draw.choice(["fp32", "bf16"]),
        granularity=OPERATORS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_no_plan_in_slices_has_a_higher_peak_than_predicted(seed: int) -> None:
    case = drawn_in_slices(seed)
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    highest = max(max(row.allocated for row in rows), optimizer.allocated)
    error = timeline.peak_bytes / highest - 1
    print(f"{case}: {error:+.2%}")
    assert timeline.peak_bytes >= highest - SCALARS
    assert error <= (0.1 if case.precision == "fp32" else 0.25)


@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw-8bit", "adafactor"])
def test_what_steps_by_chunks_needs_no_more_than_a_chunk(optimizer: str) -> None:
    """States are equal to the byte; for the chunk itself the largest parameter counts, of which a rank has a part."""
    case = Case((KEEP, FREE, REPLICATE), optimizer=optimizer)
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    expected, optimizer_bytes = predicted(timeline)
    rows, stepped = measured(case, plan_of(case, layout, options))
    assert not differences(rows, expected, SCALARS)
    extra = optimizer_bytes - max(stepped.allocated, stepped.at_mark)
    units = zip(layout.units, options, layout.places, strict=True)
    factors = sum(stepping_bytes(*each, case.training, case.cluster) for each in units)
    assert -SCALARS <= extra <= chunk_bytes(layout.graph, case.training) + factors


MIXED = (False, True, True)
ONCE_CASES = [
    Case(EVERY_MODE, accumulation=2, reduce_once=ALL),
    Case((FREE, KEEP, REPLICATE), accumulation=2, reduce_once=ALTERNATING, device="CPU"),
    # a unit that is not reduced ends the reduction before it
    Case((FREE, KEEP), model="llama", world="1x2", precision="fp32", accumulation=3, reduce_once=MIXED, device="CPU"),
    Case((FREE,), model="gpt2", world="1x3", precision="fp32", accumulation=2, reduce_once=MIXED, device="CPU"),
    Case((KEEP, FREE), model="vit", granularity=OPERATORS, precision="fp32", accumulation=2, reduce_once=MIXED),
]


@pytest.mark.parametrize("case", ONCE_CASES, ids=str)
def test_with_gradients_reduced_once_the_timeline_is_never_below_fsdp2(case: Case) -> None:
    """Unreduced gradients are counted through backward, though the last micro-batch frees them one by one."""
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    assert not [line for line in differences(rows, predicted(timeline)[0]) if "too little" in line]
    assert abs(int(timeline.total[-1]) - max(optimizer.allocated, optimizer.at_mark)) <= SCALARS
    highest = max(row.allocated for row in rows)
    assert highest - SCALARS <= timeline.peak_bytes <= 1.1 * highest


STAYS = {"gather_once": ALL}
DEVICES = ("A100-80GB", "CPU")
GATHERED_ONCE_CASES = [  # gathered by the first of several micro-batches, freed by the last
    *(Case((KEEP,), accumulation=3, world="1x2", device=d, **STAYS) for d in DEVICES),
    *(Case((KEEP_IN_NODE, FREE, KEEP), accumulation=3, device=d, recompute=ALTERNATING, **STAYS) for d in DEVICES),
    Case(EVERY_MODE, model="llama", accumulation=3, granularity=OPERATORS, precision="fp32", gather_once=ALTERNATING),
    Case(EVERY_MODE, accumulation=3, reduce_dtype="bf16", device="CPU", gather_once=ALTERNATING),
    Case(IN_NODE, accumulation=3, all_reduce_once=ALL, **STAYS),
    Case((KEEP,), accumulation=3, world="1x8", **STAYS),
    Case((KEEP, FREE), model="llama-tied", accumulation=3, precision="pure-bf16", **STAYS),
    Case((KEEP, FREE), model="stacked", accumulation=3, device="CPU", **STAYS),
    *(Case((FREE, KEEP), accumulation=3, device=d, **STAYS, **DEEP) for d in DEVICES),
]


@pytest.mark.parametrize("case", GATHERED_ONCE_CASES, ids=str)
def test_with_units_gathered_once_the_peak_is_that_of_fsdp2(case: Case) -> None:
    """In the first micro-batch, at a gather, it may be too much by the gather's output; see [Note: Gathered once]."""
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    expected, optimizer_bytes = predicted(timeline)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    largest = max(unit.sizes(KEEP, case.cluster).gathered for unit in layout.units)
    found = differences(rows, expected)
    assert not [line for line in found if "too little" in line]
    assert not differences(rows, expected, SCALARS + largest * case.training.precision.compute_bytes)
    assert not [line for line in found if "enter" not in line]
    assert not found or case.world != "1x2"
    stepping = max(optimizer.allocated, optimizer.at_mark)
    assert abs(optimizer_bytes - stepping) <= SCALARS
    assert abs(timeline.peak_bytes - max(max(row.allocated for row in rows), stepping)) <= SCALARS


@pytest.mark.parametrize("device", DEVICES)
def test_of_two_micro_batches_with_units_gathered_once_the_timeline_is_never_below_fsdp2(device: str) -> None:
    case = Case((KEEP,), accumulation=2, device=device, **STAYS)
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    rows, _ = measured(case, plan_of(case, layout, options))
    assert not [line for line in differences(rows, predicted(timeline)[0]) if "too little" in line]
    assert timeline.peak_bytes <= 1.06 * max(row.allocated for row in rows)


def test_a_gradient_that_is_a_view_is_kept_without_the_tensor_behind_it() -> None:
    """At batch 1 the class token's gradient is a view of that of all tokens, which a unit that is not reduced kept."""
    once = {"accumulation": 2, "reduce_once": ALL, "batch": 1, "world": "1x4", "device": "CPU"}
    case = Case((REPLICATE, FREE, KEEP), model="vit", granularity=PARTS, precision="fp32", recompute=ALL, **once)
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, case.batch, case.training, case.cluster)
    rows, _ = measured(case, plan_of(case, layout, options))
    assert max(row.allocated for row in rows) - SCALARS <= timeline.peak_bytes


LEFT_AT_THE_END = [
    Case((KEEP,), model="t5", granularity=OPERATORS, precision="fp32", device="CPU"),
    Case((FREE, KEEP), model="t5", granularity=OPERATORS, precision="fp32", recompute=ALL, accumulation=2),
    Case((KEEP, FREE, REPLICATE), model="t5", granularity=OPERATORS, precision="pure-bf16", accumulation=2),
]


@pytest.mark.parametrize("case", one_in(3, LEFT_AT_THE_END, ids=str))
def test_units_of_blocks_that_are_left_when_backward_ends_are_never_below_fsdp2(case: Case) -> None:
    """What they hold when backward leaves their block is counted to its end; see [Note: Left at the end]."""
    layout, options = laid_out(case)
    assert any(places.late for places in layout.places)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    assert not [line for line in differences(rows, predicted(timeline)[0]) if "too little" in line]
    assert abs(int(timeline.total[-1]) - max(optimizer.allocated, optimizer.at_mark)) <= SCALARS
    highest = max(max(row.allocated for row in rows), optimizer.allocated, optimizer.at_mark)
    assert highest - SCALARS <= timeline.peak_bytes <= 1.1 * highest


@pytest.mark.parametrize("model", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_mixture_without_the_first_block_is_never_below_fsdp2(model: str) -> None:
    """What the first block's checkpoint would hold is counted though it is not recomputed: upwards, and no more."""
    again = tuple(stage.name in ("model.layers.1", "decoder.block.1.layer.1") for stage in captured(model).blocks)
    assert any(again) and not again[0]
    case = Case(model=model, recompute=again)
    layout, options = laid_out(case)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    assert not [line for line in differences(rows, predicted(timeline)[0]) if "too little" in line]
    highest = max(max(row.allocated for row in rows), optimizer.allocated, optimizer.at_mark)
    assert 0 <= timeline.peak_bytes - highest <= 4096 + SCALARS
