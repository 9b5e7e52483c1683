"""torch's own planner of activation checkpointing under FSDP2, `torch.distributed._tools.sac_ilp.sac_milp`.

It is fed as torch's documentation shows: a step on fake tensors under `MemTracker`, `RuntimeEstimator` and
`SACEstimator`. Their roofline asks the GPU that is present for its rates; here the same roofline takes those of the
catalogue's device. Blocks are its units, and only they and what is outside of them are given to it: 50 modules, not
700. It says for each block which share of its activations to discard. osdp's nearest recompute is taken, with every
block sharded and freed. It counts neither optimizer states nor gathered parameters: what these need is taken off the
limit, and the budget is then corrected by what osdp's timeline finds, as a user would by trial runs.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACGreedyOrderMeta, SACStats, SACTradeOffStats

from osdp.answer import predicted_of
from osdp.baselines import baselines
from osdp.batching import Batching
from osdp.cost.graph import StepGraph
from osdp.cost.positions import SAVED, TEMPORARIES
from osdp.cost.tables import Rules, Uniform
from osdp.cost.units import WHOLE
from osdp.model.device_kernels import kernels_of
from osdp.model.fake import DTYPES, fake_copy, settled
from osdp.model.inputs import map_tensors
from osdp.model.source import load_model
from osdp.model.structure import own_blocks
from osdp.model.values import fake_of
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search.problem import StageChoice
from osdp.sharding import FREE
from planners.judge import Answer, Case, Space, cpu_seconds, judged, plan_of
from planners.roofline import roofline

RULES = Rules(modes=(FREE,), split=False, granularities=(WHOLE,), two_levels=False, prefetch=(1,))
ROUNDS = 3  # of correcting the budget: each may take the 180 s at which torch stops its solver
ENOUGH = 0.02  # of the limit: with less to spare the budget is not raised
GIB = 2**30
ACTIVATIONS = (SAVED, TEMPORARIES)


class _FittedOnce(SACEstimator):
    """Blocks that are alike have the same trade-off, which takes half a second of fitting: it is fitted once."""

    def _get_sac_tradeoff_pwlf_stats(
        self, sac_stats: SACStats, greedy_order_meta: SACGreedyOrderMeta, *args: Any, **kwargs: Any
    ) -> SACTradeOffStats:
        key = tuple(sac_stats.memory), tuple(sac_stats.runtimes)
        known: dict[Any, SACTradeOffStats] = self.__dict__.setdefault("fitted", {})
        if key not in known:
            known[key] = super()._get_sac_tradeoff_pwlf_stats(sac_stats, greedy_order_meta, *args, **kwargs)
        return known[key]


@dataclass(frozen=True)
class Stats:
    """What torch's estimators say of a model at one batch size; `blocks` by their names in torch's graph."""

    graph: Graph
    blocks: Mapping[str, str]  # osdp's name: torch's
    seconds: float

    @property
    def sharded_bytes(self) -> float:
        """Parameters and gradients, as the planner counts them before they are divided by the ranks."""
        nodes = self.graph.nodes
        return nodes[0]["param_per_module"] + max(node["grad_total"] for node in nodes)


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@cache
def stats_of(case: Case, batch: int) -> Stats:
    began = cpu_seconds()
    source, device = load_model(case.model), case.devices.device
    dtype = case.training.precision.compute_dtype
    inputs = source.inputs(batch)
    tracker, clock, again = MemTracker(), RuntimeEstimator(), _FittedOnce()
    original = source.build_on_meta()
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of(device, original):
        model = settled(fake_copy(original, DTYPES[dtype]))
        args, kwargs = map_tensors(fake_of, inputs)

        def step() -> None:
            source.loss(model(*args, **kwargs)).backward()
            model.zero_grad()

        tracker.track_external(model)
        with tracker:
            step()
        with _quiet(), clock("operator-level-cost-model"):
            clock._estimate = roofline(device)
            step()
        with again("operator-level-cost-model"):
            again._estimate_runtime = roofline(device)
            step()
        names = own_blocks(model)
        graph = _graph(model, names, tracker, clock, again)
    root = type(model).__name__
    return Stats(graph, {name: f"{root}.{name}" for name in names}, cpu_seconds() - began)


def _graph(
    model: nn.Module, blocks: Sequence[str], tracker: MemTracker, clock: RuntimeEstimator, again: SACEstimator
) -> Graph:
    """torch's graph of the model's blocks and of what is outside of them."""
    root = type(model).__name__
    kept = {f"{root}.{name}" for name in blocks}
    for stats in (again.sac_mod_stats, again.sac_mod_greedy_order_meta):
        for name in [name for name in stats if name not in kept]:
            del stats[name]
    info = aggregate_stats(model, tracker, clock, again, torch.device("cpu"))

    def is_wanted(name: str) -> bool:
        return not any(name.startswith(f"{block}.") for block in kept)

    info["mod_stats"] = [each for each in info["mod_stats"] if is_wanted(each["fqn"])]
    order: Any = info["mod_order"]
    for key in order:
        order[key] = [name for name in order[key] if is_wanted(name)]
    return parse_module_info(info)


def discarded(stats: Stats, budget_bytes: float, ranks: int) -> dict[str, float] | None:
    """The share of each block's saved activations that the planner discards; None where it finds nothing that fits."""
    from torch.distributed._tools.sac_ilp import sac_milp

    units = list(stats.blocks.values())
    chosen, _, peak = sac_milp(stats.graph, budget_bytes / GIB, world_size=ranks, ac_units=units, fsdp_units=units)
    if peak < 0:
        return None
    shares = {}
    for name, node_name in stats.blocks.items():
        node = stats.graph.name2node[node_name]
        whole, saved = node["sac_memory"], node["act_fw_per_module"]
        share = chosen.get(node_name)
        shares[name] = 0.0 if share is None or not saved else (whole * share - (whole - saved)) / saved
    return shares


def nearest(saved: Mapping[Recompute, int], share: float) -> Recompute:
    """Of a block's ways of recompute the one whose saved bytes are nearest to what is left of those without."""
    left = saved[Recompute.NONE] * (1 - share)
    return min(saved, key=lambda how: abs(saved[how] - left))


def translated(space: Space, batch: int, shares: Mapping[str, float]) -> tuple[StageChoice, ...]:
    """The planner's answer as a choice of osdp's tables."""
    problem = space.problem(batch)
    ways = {how: space.tables.uniform(problem, Uniform(FREE, how, False)) for how in EVERY_RECOMPUTE}
    chosen = []
    for number, (table, stage) in enumerate(zip(problem.stages, space.case.graph.stages, strict=True)):
        each = {how: way[number] for how, way in ways.items() if way is not None}
        saved = {how: table.variants[choice.variant].saved for how, choice in each.items()}
        how = nearest(saved, shares[stage.name]) if stage.name in shares else Recompute.NONE
        chosen.append(each[how])
    return tuple(chosen)


def _others_bytes(step: StepGraph) -> int:
    """What a step holds at its peak beside activations."""
    return sum(size for part, size in predicted_of(step).memory_parts.items() if part not in ACTIVATIONS)


def at_batch(case: Case, batch: int) -> tuple[StepGraph, int] | None:
    """The best step of the planner at a batch size that fits by osdp's timeline, and how often it was asked."""
    stats, ranks, limit = stats_of(case, batch), case.devices.world_size, case.devices.limit_bytes
    spaces = {again: Space(case, RULES, recomputed=again) for again in (False, True)}

    def step_of(shares: Mapping[str, float]) -> StepGraph:
        space = spaces[any(share > 0 for share in shares.values())]
        return space.step(batch, translated(space, batch, shares))

    most = step_of(dict.fromkeys(stats.blocks, 1.0))
    budget = limit - _others_bytes(most) + stats.sharded_bytes / ranks
    best: StepGraph | None = None
    asked = 0
    while asked < ROUNDS:
        asked += 1
        shares = discarded(stats, budget, ranks)
        if shares is None:
            break
        step = step_of(shares)
        spare = limit - step.timeline().peak_bytes
        if spare >= 0 and (best is None or step.seconds < best.seconds):
            best = step
        if 0 <= spare < ENOUGH * limit or (spare >= 0 and not any(shares.values())):
            break
        budget += spare
    return None if best is None else (best, asked)


def _sizes(case: Case) -> list[int]:
    """The batch sizes that FSDP takes at its best with each kind of recompute, and one between the outermost."""
    usual = baselines(case.graph, case.devices, case.training, Batching())
    found = {way.baseline.batch_size for way in usual if way.baseline.feasible and way.uniform.mode == FREE}
    return sorted({*found, round(math.sqrt(min(found) * max(found)))}) if found else []


def sac(case: Case, *, dry: bool) -> Answer | None:
    """The planner's best over a few batch sizes: it has none to choose itself."""
    began = cpu_seconds()
    sizes = _sizes(case)
    tried = [found for batch in sizes if (found := at_batch(case, batch)) is not None]
    if not tried:
        return None
    best, asked = min(tried, key=lambda found: found[0].seconds / found[0].batch)
    used = cpu_seconds() - began
    notes = f"batch sizes {', '.join(map(str, sizes))}; budget set {asked} times"
    return judged("torch's sac_milp", case, plan_of(case, best), seconds=used, dry=dry, notes=notes)
