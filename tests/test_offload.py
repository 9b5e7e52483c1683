"""Claims about units whose parameters, gradients and optimizer states are on the host.

- Trained under stock FSDP2 on real ranks, they give what a single process does: with and without accumulation, in every
  mode that can be held so. On CPUs nothing moves, but every path is taken.
- The search's tables judge them as the timeline and the step graph do, and what they take on the host is a sum.
- On a stand-in with a memory of its own, FSDP2 allocates to the byte what the timeline says, on device and host.
- They are offered where nothing fits otherwise, and nowhere else; plan files carry and check them.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Model, odd_graph
from planned import plan_by_hand
from ranks import run_ranks
from selection import one_in
from small_models import captured, source
from test_tables_equal_timeline import random_choice
from test_timeline_equals_fsdp2 import BATCH, SCALARS, Case, differences, laid_out, plan_of, predicted, rows_of
from torch.distributed.fsdp import CPUOffloadPolicy
from trained import Trained, same, train

import osdp
from osdp._torch import FakeTensorMode, fake_store
from osdp.cluster import Cluster, format_bytes
from osdp.cost.graph import StepGraph, step_graph, step_graph_of
from osdp.cost.offload import pinned_bytes
from osdp.cost.tables import Rules, Tables
from osdp.cost.timeline import build_timeline
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS
from osdp.engine import STOCK
from osdp.errors import DoesNotFit, UsageError
from osdp.export.write import export
from osdp.model.device_kernels import kernels_of
from osdp.model.fake import fake_copy, same_draws, sequences_not_packed, settled
from osdp.model.inputs import map_tensors
from osdp.model.runs import watched
from osdp.model.structure import own_blocks
from osdp.model.values import Values
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.report.difference import plan_difference
from osdp.report.page import plan_page
from osdp.runtime.memory_attribution import MemoryAttributionRecorder
from osdp.search.evaluate import evaluate
from osdp.search.problem import Problem, StageChoice
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.training.optimizer import optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")

HOLDABLE = (FREE, KEEP, FREE_IN_NODE, KEEP_IN_NODE)


def on_host(plan: Plan, every: int = 1) -> Plan:
    """The plan with every so manieth of the units that can be there on the host, 0 for none; for a device with one."""
    able = [unit.name for unit in plan.units if unit.mode in HOLDABLE and unit.splits == 1]
    there = able[::every] if every else []
    units = [replace(unit, offload=unit.name in there, two_levels=False) for unit in plan.units]
    return replace(plan, units=tuple(units))


# ---- the search


def judged_as_timeline(tables: Tables, problem: Problem, choice: tuple[StageChoice, ...]) -> StepGraph:
    """Checks that a choice at batch 2 has the timeline's bytes, on the device and on the host, and its seconds."""
    verdict = evaluate(problem, choice)
    layout, options = tables.read(problem, choice)
    graph = step_graph(layout, options, 2, tables.training, tables.cluster)
    timeline = build_timeline(layout, options, 2, tables.training, tables.cluster)
    assert verdict.peak == timeline.peak_bytes
    assert verdict.seconds == pytest.approx(graph.time().total, rel=1e-9)
    host = graph.host_bytes() // tables.cluster.devices_per_node
    fits, exceeds = (evaluate(replace(problem, host_limit=host - less), choice).peak for less in (0, 1))
    assert fits == verdict.peak and (exceeds == problem.limit + 1 or host == 0)
    return graph


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("cluster", ["2x2xA100-40GB", "3xA100-40GB"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_tables_judge_units_on_the_host_as_the_timeline_does(model: str, cluster: str, accumulation: int) -> None:
    training = replace(Training.of("bf16", "adamw"), accumulation=accumulation)
    tables = Tables(captured(model), Cluster.parse(cluster), training, Rules(offload=True, split=False))
    draw, taken = random.Random(3), []
    for recomputed in tables.recompute_cases:
        problem = tables.problem(2, limit=1 << 40, accumulation=accumulation, recomputed=recomputed)
        for number in range(40):
            choice = random_choice(problem, draw, uniform=number % 2 == 1)
            taken += judged_as_timeline(tables, problem, choice).options
    assert {option.mode for option in taken if option.offload} >= {FREE, KEEP}
    assert any(option.mode != REPLICATE and not option.offload for option in taken)


def test_a_unit_on_the_host_takes_its_copies_and_the_hosts_step() -> None:
    cluster = Cluster.parse("4xA100-40GB")
    here = plan_by_hand("gpt", "4", modes=(FREE,), precision="bf16", device="A100-40GB")
    graph = captured("gpt", "bf16", "A100-40GB")
    step, away = step_graph_of(here, graph), step_graph_of(on_host(here), graph)
    held = {unit.name: unit.sizes(FREE, cluster).held * 4 for unit in step.layout.units}
    shards = sum(held.values())
    gathered = sum(held[node.name] for node in step.nodes if node.kind == "all_gather")
    copied = gathered / cluster.device.host_bytes_per_second
    assert shards < gathered <= 2 * shards
    assert away.time().copies == pytest.approx(step.time().copies + copied)
    stepped = 20 * shards / cluster.device.host_memory_bytes_per_second
    assert away.time().optimizer == pytest.approx(stepped)
    out = [node for node in away.nodes if node.kind == "to_host"]
    assert len(out) == len(step.layout.units) and {node.stream for node in out} == {"communication"}
    assert sum(node.seconds for node in out) == pytest.approx(shards / cluster.device.host_bytes_per_second)
    assert away.collectives() == step.collectives()
    assert away.timeline().peak_bytes < step.timeline().peak_bytes


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def small(cluster: Cluster, limit_bytes: int) -> Cluster:
    return replace(cluster, reserve_fraction=0.0, memory_bytes=limit_bytes)


def test_the_host_is_used_where_nothing_fits_without_it_and_nowhere_else() -> None:
    graph, cluster = captured("gpt", "bf16", "A100-40GB"), Cluster.parse("4xA100-40GB")
    training = Training.of("bf16", "adamw")
    plenty = plan_graph(graph, cluster, training, Rules(), batch=1, else_on_host=True)
    assert not any(unit.offload for unit in plenty.units) and plenty.predicted.host_limit_bytes == 0
    with pytest.raises(DoesNotFit) as least:
        plan_graph(graph, small(cluster, 1000), training, Rules(), batch=1)
    tight = small(cluster, least.value.peak_bytes * 9 // 10)
    with pytest.raises(DoesNotFit) as without:
        plan_graph(graph, tight, training, Rules(), batch=1)
    assert "units on the host (offload auto)" in [remedy.change for remedy in without.value.remedies]
    found = plan_graph(graph, tight, training, Rules(), batch=1, else_on_host=True)
    assert any(unit.offload for unit in found.units)
    assert 0 < found.predicted.host_peak_bytes <= found.predicted.host_limit_bytes == tight.host_limit_bytes
    assert found.predicted.peak_bytes <= tight.limit_bytes
    assert Plan.from_dict(found.to_dict()) == found
    poor = replace(tight, host_memory_bytes=1)
    with pytest.raises(DoesNotFit):
        plan_graph(graph, poor, training, Rules(), batch=1, else_on_host=True)
    scarce = replace(tight, host_memory_bytes=found.predicted.host_peak_bytes // 3)
    with pytest.raises(DoesNotFit) as little:
        plan_graph(graph, scarce, training, Rules(), batch=1, else_on_host=True)
    enough = format_bytes(2 * scarce.host_total_bytes)
    changes = {remedy.change: remedy.peak_bytes for remedy in little.value.remedies}
    assert changes[f"{enough} of memory on each node's host (--host-memory)"] <= tight.limit_bytes


def test_a_plan_that_cannot_be_held_on_the_host_is_refused() -> None:
    plan = on_host(plan_by_hand("gpt", "4", modes=(FREE,), precision="bf16", device="A100-40GB"))
    assert Plan.from_dict(plan.to_dict()) == plan
    for change, wanted in (
        ({"mode": REPLICATE, "sharded_splits": 0}, "where replicate cannot be held"),
        ({"reduce_once": True}, "collectives are not those of every micro-batch"),
    ):
        units = (replace(plan.units[0], **change), *plan.units[1:])
        with pytest.raises(UsageError, match=wanted):
            Plan.from_dict(replace(plan, units=units).to_dict())
    with pytest.raises(UsageError, match="adamw in fp16 does not step"):
        Plan.from_dict(replace(plan, precision="fp16").to_dict())
    with pytest.raises(UsageError, match="nothing is known of the host"):
        Plan.from_dict(replace(plan, cluster=Cluster.parse("4xCPU")).to_dict())


# ---- what people see


def test_the_page_and_the_difference_say_what_is_on_the_host() -> None:
    here = plan_by_hand("gpt", "4", modes=(FREE,), precision="bf16", device="A100-40GB")
    there = on_host(here, 2)
    there = replace(there, predicted=replace(there.predicted, host_peak_bytes=1 << 30, host_limit_bytes=1 << 31))
    assert plan_page(here).host is None
    page = plan_page(there)
    assert page.host is not None and (page.host.peak_bytes, page.host.limit_bytes) == (1 << 30, 1 << 31)
    shown = {name: unit.offload for group in page.groups for name in group.names for unit in group.units}
    assert shown == {unit.name: unit.offload for unit in there.units}
    assert page.host.parameter_share == sum(u.parameters for u in there.units if u.offload) / there.model.parameters
    assert page.host.is_assumed and page.host.total_bytes == 4 * there.cluster.device.host_memory_bytes
    changed = plan_difference(here, there).units
    assert changed and {(each.before, each.after) for each in changed} == {("free", "free, on the host")}


def test_exported_code_gives_units_on_the_host_fsdp2s_policy() -> None:
    there = on_host(plan_by_hand("gpt", "4", modes=(FREE, KEEP), precision="bf16", device="A100-40GB"), 2)
    graph = captured("gpt", "bf16", "A100-40GB")
    with torch.device("meta"):
        model = source("gpt").build()
    text = export(there, graph, model, target="fsdp2").text
    names: dict[str, Any] = {}
    exec(text, names)
    units = {modules[0]: mode for modules, mode in names["UNITS"]}
    wanted = {unit.name: unit.mode + (" on the host" if unit.offload else "") for unit in there.units}
    assert units == wanted and set(wanted.values()) == {"free on the host", "keep"}
    assert '"offload_policy": CPUOffloadPolicy()' in text and "def clip_grad_norm_" in text
    lost = export(there, graph, model, target="accelerate").degraded.lost
    assert any("on the host: they are on the device" in each for each in lost)


# ---- on ranks


def trained_on_rank(plans: list[Plan], times: int) -> list[Trained]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        model = osdp.parallelize(Model(), plan, engine=STOCK)
        found.append(train(model, make=adamw, times=times))
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, foreach=True)


@pytest.mark.parametrize("times", [1, 3])
def test_training_with_units_on_the_host_is_exact(times: int) -> None:
    graph = odd_graph(Model)
    plans = [
        on_host(plan_by_hand(graph, "2x2", modes=modes, accumulation=times, device="A100-40GB"), every)
        for modes, every in (((FREE, KEEP, REPLICATE), 1), (HOLDABLE, 1), (HOLDABLE, 2))
    ]
    torch.manual_seed(0)
    truth = train(Model(), make=adamw)
    for found in run_ranks(4, trained_on_rank, plans, times):
        for each in found:
            same(each, truth)


# ---- on a device with a memory of its own


def dry_run_on_a_stand_in(case: Case, every: int) -> Any:
    """The rows of a step as FSDP2 runs it in one process, of the device alone; and the most that the host had."""
    import standin

    from osdp.cost import offload
    from osdp.runtime import apply, dryrun

    dist.destroy_process_group()
    device = standin.stand_in()
    dist.Backend.backend_capability["fake"].append(device.type)
    layout, options = laid_out(case)
    chosen = {unit.name for unit in on_host(plan_of(case, layout, options), every).units if unit.offload}
    options = [replace(o, offload=u.name in chosen) for u, o in zip(layout.units, options, strict=True)]
    plan, model = plan_of(case, layout, options), source(case.model)
    # Fake tensors are not pinned; else FSDP2's policy is what the plan says.
    apply.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)  # type: ignore[assignment, misc]
    offload.pinned_bytes = lambda nbytes: nbytes
    dryrun.MemoryAttributionRecorder = OfTheDevice  # type: ignore[misc]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=plan.cluster.world_size)
    with torch.device("meta"):
        sharded = model.build()
        names = list(watched(sharded, own_blocks(sharded)))
    with mode:
        dtype = torch.bfloat16 if case.precision == "pure-bf16" else torch.float32
        sharded = settled(fake_copy(sharded, dtype))
        moved(sharded, device)
    with standin.makes_tensors(mode):
        apply.parallelize(sharded, plan, device=device, engine=STOCK)
    given = model.inputs(plan.batch_size)
    with same_draws(), mode, Values(plan.batch_size):
        optimizer = partial(optimizer_of, case.optimizer, lr=1e-3)
        modules = {name: sharded.get_submodule(name) for name in names}
        step = dryrun._Step(sharded, given, plan, model.loss, lambda _: modules, optimizer)
        step.args, step.kwargs = map_tensors(lambda tensor: tensor.to(device), (step.args, step.kwargs))
        with sequences_not_packed(step.kwargs), kernels_of(plan.cluster.device, sharded):
            raw = step.second().trace
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    host = step_graph(layout, options, BATCH, case.training, case.cluster).host_bytes()
    rows, last = rows_of(raw, case.accumulation)
    where = {parameter.device.type for parameter in sharded.parameters()}
    found = (
        differences(rows, predicted(timeline)[0], SCALARS + case.known[0]),
        timeline.peak_bytes,
        predicted(timeline)[1],
    )
    (recorder,) = made
    return *found, rows, last, where, recorder.most_on_host, host // case.cluster.devices_per_node


def moved(model: torch.nn.Module, device: torch.device) -> None:
    """Gives a fake model's tensors another device; `Module.to` cannot."""
    known: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor not in known:
                    empty = torch.empty_like(tensor, device=device, requires_grad=False)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    known[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[key] = None if tensor is None else known[tensor]


made: list[OfTheDevice] = []


class OfTheDevice(MemoryAttributionRecorder):
    """Counts what is on the device, and beside it what is on the host."""

    def __init__(self, issued: Any) -> None:
        super().__init__(issued)
        self.on_host = self.most_on_host = 0
        self._there: dict[int, Any] = {}
        made.append(self)

    def _hold(self, tensor: torch.Tensor) -> bool:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "cpu":
            return super()._hold(tensor)
        storage = local.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._there:
            self._there[key] = weakref.ref(storage, partial(self._left, key, nbytes))
            self.on_host += nbytes
            self.most_on_host = max(self.most_on_host, self.on_host)
        return False

    def _left(self, key: int, nbytes: int, _: object) -> None:
        del self._there[key]
        self.on_host -= nbytes


STATISTICS = (896, 896)  # of layer norms in 16 bits: they have 32 bits on a device, and 16 on the CPU, as traced
ON_A_DEVICE = [
    (Case((FREE, KEEP), optimizer="lion", world="1x4", known=STATISTICS), 1),
    (Case((FREE, KEEP, REPLICATE), optimizer="lion", world="1x4", known=STATISTICS), 2),
    (Case(HOLDABLE, optimizer="lion", known=STATISTICS), 1),
    (Case(HOLDABLE, optimizer="lion", precision="fp32", granularity=OPERATORS), 2),
    (Case(HOLDABLE, optimizer="lion", precision="fp32", reduce_dtype="bf16", accumulation=2), 1),
    (Case((FREE, KEEP), optimizer="lion", precision="fp32", granularity=OPERATORS, accumulation=2), 2),
    (Case((FREE, FREE_IN_NODE), optimizer="lion", precision="fp32", granularity=OPERATORS, prefetch=2), 2),
]


@pytest.mark.parametrize(("case", "every"), one_in(2, ON_A_DEVICE))
def test_fsdp2_allocates_what_the_timeline_says_on_the_device_and_on_the_host(case: Case, every: int) -> None:
    """Without recompute, of which tests/test_inputs_on_host.py has some."""
    ((differing, peak, stepping, rows, last, where, on_host, host),) = run_ranks(1, dry_run_on_a_stand_in, case, every)
    assert where == ({"cpu"} if every == 1 and REPLICATE not in case.modes else {"cpu", "standin"})
    assert not differing
    assert abs(stepping - max(last.allocated, last.at_mark)) <= SCALARS
    assert abs(peak - max(*(row.allocated for row in rows), last.allocated, last.at_mark)) <= SCALARS + case.known[1]
    assert 0 < on_host == host
