"""Claims about blocks whose input is on the host between their two forwards.

- Trained on real ranks, they give what a single process does, by both engines; of what a block is given, the first
  tensor alone is put there, as it was, and got back once.
- On a stand-in with a memory of its own, FSDP2 and torch's checkpoint allocate to the byte what the timeline says, on
  device and host.
- The search's tables judge them as the timeline and the step graph do; what they take on the host is within its limit.
- They are chosen where nothing fits otherwise, and nowhere else; where joined traces would not hold, no block has them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from odd_models import WIDTH, Block, Model, data
from planned import plan_by_hand
from ranks import run_ranks
from small_models import captured, source
from test_offload import SCALARS, STATISTICS, dry_run_on_a_stand_in, judged_as_timeline, on_host, small
from test_tables_equal_timeline import random_choice
from test_timeline_equals_fsdp2 import Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained import Trained, same, train

import osdp
from osdp.cluster import Cluster
from osdp.cost.graph import step_graph_of
from osdp.cost.offload import pinned_bytes
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS
from osdp.engine import ASYNC_GLOO, STOCK
from osdp.errors import DoesNotFit, UsageError
from osdp.export.write import export
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.input_on_host import RealHost, with_input_on_host
from osdp.model.selective import checkpointed
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute, read_recompute
from osdp.report.difference import plan_difference
from osdp.report.page import host_sentence, plan_page
from osdp.sharding import FREE, KEEP, REPLICATE

NONE, SELECTIVE, FULL, HOST = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, Recompute.ON_HOST
pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")


# ---- on ranks


class Deep(Model):
    """Four blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))


class EndsInReLU(Block):
    """Its last operator saves what it puts out: the next block's input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class ByKeyword(Deep):
    """Its blocks are given their input by keyword, where no checkpoint saves it as a tensor."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


class Rectified(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EndsInReLU() for _ in range(4))


@cache
def graph_of(kind: type[nn.Module]) -> ModelGraph:
    return capture(kind(), data(2, seed=0), compute_dtype="fp32", on_host=True)


def trained_on_rank(plans: list[Plan], times: int) -> list[Trained]:
    found = []
    for plan in plans:
        for engine in (ASYNC_GLOO, STOCK):
            torch.manual_seed(0)
            found.append(train(osdp.parallelize(Deep(), plan, engine=engine), times=times))
    return found


def test_training_with_inputs_on_the_host_is_exact() -> None:
    details: dict[str, Any] = {"accumulation": 2, "device": "A100-40GB"}
    plans = [
        plan_by_hand(graph_of(Deep), "1x2", modes=(FREE, KEEP), recompute=(NONE, HOST, FULL, HOST), **details),
        plan_by_hand(
            graph_of(Deep), "1x2", modes=(FREE, REPLICATE), granularity=OPERATORS, recompute=(FULL, HOST), **details
        ),
    ]
    plans[1] = on_host(plans[1], 2)
    assert [sum(unit.recompute is HOST for unit in plan.units) for plan in plans] == [2, 6]
    torch.manual_seed(0)
    truth = train(Deep())
    for found in run_ranks(2, trained_on_rank, plans, 2):
        for each in found:
            same(each, truth)


class _Noting(RealHost):
    """A host that remembers what it was given, and how often it gave it back."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.got = 0

    def put(self, tensor: Tensor) -> Any:
        self.given.append(tensor)
        return super().put(tensor)

    def get(self, held: Any) -> Tensor:
        self.got += 1
        return super().get(held)


def test_only_a_blocks_first_tensor_goes_to_the_host_and_comes_back_once() -> None:
    weight, mask = torch.randn(5, 5, requires_grad=True), torch.randn(5)
    ids, first = torch.arange(5), torch.randn(3, 5, requires_grad=True)

    def forward(index: Tensor, x: Tensor, mask: Tensor, *, weight: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x[:, index] @ weight) * mask)

    host = _Noting()
    run = with_input_on_host(lambda *a, **k: checkpoint(forward, *a, use_reentrant=False, **k), host)
    x = (first * 2).t().contiguous().t()  # its strides are kept: kernels may follow them
    run(ids, x, mask, weight=weight).sum().backward()
    assert [each is x for each in host.given] == [True] and host.got == 1
    _, there = RealHost().put(x)
    assert there.stride() == x.stride() and there.data_ptr() != x.data_ptr() and torch.equal(there, x)
    found, first.grad, weight.grad = (first.grad, weight.grad), None, None
    forward(ids, first * 2, mask, weight=weight).sum().backward()
    for own, true in zip(found, (first.grad, weight.grad), strict=True):
        assert own is not None and true is not None and torch.equal(own, true)


def test_a_compiled_block_gives_and_gets_its_input_too() -> None:
    """The checkpoint is around what is compiled; see [Note: Compiled blocks] in osdp.runtime.compiled."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 6, WIDTH, requires_grad=True)
    truth = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    host, compiled = _Noting(), torch.compile(block.forward, backend="aot_eager")
    block.forward = checkpointed(compiled, HOST, host=host)  # type: ignore[method-assign]
    for own, true in zip(torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()]), truth, strict=True):
        assert torch.equal(own, true)
    assert len(host.given) == host.got == 1


# ---- on a device with a memory of its own


def on_a_stand_in(case: Case, every: int) -> Any:
    from osdp.model import input_on_host

    input_on_host.is_pinned = lambda tensor: False  # fake tensors are not
    return dry_run_on_a_stand_in(case, every)


ON_A_DEVICE = [
    (Case((FREE, KEEP), optimizer="lion", precision="fp32", recompute=(FULL, HOST, HOST)), 0),
    (Case((FREE, KEEP, REPLICATE), optimizer="lion", recompute=(NONE, SELECTIVE, HOST), known=STATISTICS), 0),
    (Case((KEEP, FREE), optimizer="lion", precision="fp32", recompute=(NONE, HOST), accumulation=2), 0),
    (Case((FREE, KEEP), optimizer="lion", precision="fp32", granularity=OPERATORS, recompute=(NONE, FULL, HOST)), 0),
    (Case((FREE, KEEP), optimizer="lion", precision="fp32", recompute=(FULL, HOST, HOST)), 1),
]


@pytest.mark.parametrize(("case", "every"), ON_A_DEVICE, ids=str)
def test_ranks_allocate_what_the_timeline_says_on_the_device_and_on_the_host(case: Case, every: int) -> None:
    ((differing, peak, stepping, rows, last, _, most, host),) = run_ranks(1, on_a_stand_in, case, every)
    assert not differing
    assert abs(stepping - max(last.allocated, last.at_mark)) <= SCALARS
    assert abs(peak - max(*(row.allocated for row in rows), last.allocated, last.at_mark)) <= SCALARS + case.known[1]
    blocks = sum(each is HOST for each in (case.recompute * 3)[:3])
    inputs = blocks * 2 * 16 * 32 * (4 if case.precision == "fp32" else 2)
    if every:  # units have their most in the optimizer, inputs at the end of forward
        assert host - inputs <= most <= host
    else:
        assert most == host == inputs


# ---- the search


def deep(*, with_inputs: bool = True) -> ModelGraph:
    return captured("gpt-deep", "bf16", "A100-40GB", on_host=with_inputs)


@pytest.mark.parametrize(("cluster", "accumulation"), [("2x2xA100-40GB", 3), ("3xA100-40GB", 1)])
def test_tables_judge_inputs_on_the_host_as_the_timeline_does(cluster: str, accumulation: int) -> None:
    training = replace(Training.of("bf16", "adamw"), accumulation=accumulation)
    tables = Tables(captured("llama", on_host=True), Cluster.parse(cluster), training, Rules(offload=True, split=False))
    problem = tables.problem(2, limit=1 << 40, accumulation=accumulation, recomputed=True)
    draw, held = random.Random(5), 0
    for number in range(60):
        choice = random_choice(problem, draw, uniform=number % 2 == 1)
        graph = judged_as_timeline(tables, problem, choice)
        held += sum(staged.variant.recompute is HOST for staged in graph.layout.staged)
    assert held > 10


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_input_on_the_host_takes_two_copies_and_its_bytes(accumulation: int) -> None:
    details: dict[str, Any] = {"modes": (FREE,), "precision": "bf16", "accumulation": accumulation}
    full, host = (
        step_graph_of(plan_by_hand(deep(), "4", recompute=(FULL, *[how] * 7), device="A100-40GB", **details), deep())
        for how in (FULL, HOST)
    )
    nbytes = 2 * 16 * 32 * 2  # of a block's input: the micro-batch, the sequence, the width, in two bytes
    seconds = accumulation * 7 * 2 * nbytes / host.cluster.device.host_bytes_per_second
    assert host.time().copies == pytest.approx(full.time().copies + seconds)
    assert host.time().compute == pytest.approx(full.time().compute)
    assert host.seconds == pytest.approx(full.seconds + seconds, rel=1e-3)  # what was exposed may hide behind a copy
    assert (full.host_bytes(), host.host_bytes()) == (0, 4 * 7 * pinned_bytes(nbytes))
    assert host.collectives() == full.collectives()
    held, less = (int(t.total[t.starts[len(t.layout.staged)]]) for t in (full.timeline(), host.timeline()))
    assert held - less == 7 * nbytes  # at the end of forward


def test_inputs_go_to_the_host_where_nothing_fits_otherwise_and_nowhere_else() -> None:
    cluster, training = Cluster.parse("4xA100-40GB"), Training.of("bf16", "adamw")
    asked, details = [], {"batch": 16, "else_on_host": True, "search_seconds": 3.0}

    def with_inputs() -> ModelGraph:
        asked.append(True)
        return deep()

    def planned(cluster: Cluster) -> Plan:
        plain = deep(with_inputs=False)
        return plan_graph(plain, cluster, training, Rules(), **details, host_graph=with_inputs)

    assert not planned(cluster).has_inputs_on_host and not asked
    with pytest.raises(DoesNotFit) as least:
        plan_graph(deep(with_inputs=False), small(cluster, 1000), training, Rules(offload=True), batch=16)
    tight = small(cluster, least.value.peak_bytes - 1000)
    found = planned(tight)
    assert asked and found.has_inputs_on_host and Plan.from_dict(found.to_dict()) == found
    assert found.predicted.peak_bytes <= tight.limit_bytes < least.value.peak_bytes
    assert 0 < found.predicted.host_peak_bytes <= found.predicted.host_limit_bytes == tight.host_limit_bytes
    step = step_graph_of(found, deep())
    assert step.host_bytes() == found.predicted.host_peak_bytes
    assert step.timeline().peak_bytes == found.predicted.peak_bytes
    with pytest.raises(DoesNotFit):
        planned(replace(tight, host_memory_bytes=1))
    with pytest.raises(DoesNotFit):
        plan_graph(deep(), tight, training, Rules(offload=True, recompute=read_recompute("selective")), batch=16)


def test_blocks_whose_neighbour_holds_their_input_have_none_on_the_host() -> None:
    assert [stage.on_host is not None for stage in graph_of(Deep).blocks] == [False, True, True, True]
    rectified = graph_of(Rectified)
    assert not any(stage.on_host for stage in rectified.blocks)
    assert "no block's input can be on the host: blocks beside it hold it too" in rectified.assumptions
    by_keyword = graph_of(ByKeyword)
    assert not any(stage.on_host for stage in by_keyword.blocks)
    assert "no block's input can be on the host: blocks.1 is given no tensor by position" in by_keyword.assumptions
    assert not any(stage.on_host for stage in captured("gpt").blocks)  # nobody asked


# ---- what people see


def held_so() -> Plan:
    return plan_by_hand(deep(), "4", modes=(FREE,), precision="bf16", recompute=(FULL, HOST), device="A100-40GB")


def test_pages_and_exports_say_what_is_on_the_host() -> None:
    there = held_so()
    units = [replace(unit, recompute=FULL) if unit.recompute is HOST else unit for unit in there.units]
    here = replace(there, units=tuple(units))
    there = replace(there, predicted=replace(there.predicted, host_peak_bytes=1 << 20, host_limit_bytes=1 << 31))
    page = plan_page(there)
    assert plan_page(here).host is None and page.host is not None
    assert (page.host.blocks, page.host.parameter_share) == (4, 0.0)
    assert "the inputs of 4 blocks are on the host" in host_sentence(page.host)
    changed = plan_difference(here, there).units
    assert {(each.before, each.after) for each in changed} == {
        ("free, recomputed", "free, recomputed, its input on the host")
    }
    with torch.device("meta"):
        model = source("gpt-deep").build()
    for target in ("fsdp2", "accelerate"):
        lost = export(there, deep(), model, target=target).degraded.lost
        assert any("the inputs of 4 blocks on the host: they are on the device" in each for each in lost)


def test_a_plan_on_devices_without_a_known_host_is_refused() -> None:
    there = held_so()
    assert Plan.from_dict(there.to_dict()) == there
    with pytest.raises(UsageError, match="has its block's input on the host, but nothing is known of the host"):
        Plan.from_dict(replace(there, cluster=Cluster.parse("4xCPU")).to_dict())
    with pytest.raises(UsageError, match="must be one of none, selective, full, auto"):
        read_recompute("host")


def test_a_dry_run_in_one_memory_refuses_inputs_on_the_host() -> None:
    from osdp.verify import verify

    model = source("gpt-deep")
    with pytest.raises(UsageError, match="inputs of blocks, on the host"):
        verify(held_so(), deep(), build=model.build, inputs=model.inputs, loss=model.loss)
