"""Plans with compiled blocks: `osdp plan --compiled`.

- On two real ranks losses and weights are those of a single process that compiles nothing, in three modes, with
  recompute and without, on both engines, and nothing is compiled anew after the first step.
- On the engine that was planned for, a step allocates no more than was planned, with the memory of compiled blocks,
  and than is planned with that of eager code.
- The plan file says it, the page says it, its blocks are one unit each, and a block in parts is refused.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn

import osdp
from osdp.cost.graph import step_graph_of
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS
from osdp.engine import ENGINES
from osdp.errors import UsageError
from osdp.model.capture import capture
from osdp.model.gpt import GPT, GPTConfig
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.profiling.trial import peak_above_start
from osdp.recompute import Recompute
from osdp.report.page import plan_page
from osdp.runtime import compiled
from osdp.sharding import FREE, KEEP, REPLICATE

CONFIG = GPTConfig(vocab_size=128, positions=64, layers=(4,), widths=(64,), head_width=16, tied=False)
BATCH, STEPS = 4, 3


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def graph(*, compiled: bool = False) -> ModelGraph:
    example = torch.zeros(1, 64, dtype=torch.long)
    return capture(model(), (example, example), compute_dtype="fp32", compiled=compiled)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(128, (BATCH, 65), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def trained(net: nn.Module) -> tuple[list[float], list[int], int]:
    """Losses, graphs compiled so far at each step, and the most bytes that a step allocates."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, graphs, peak = [], [], 0
    for step in range(STEPS):
        tokens, targets = (t.chunk(ranks)[rank] for t in batch(step))

        def run(tokens: Tensor = tokens, targets: Tensor = targets) -> None:
            loss = net(tokens, targets)
            loss.backward()
            losses.append(loss.item())

        peak = peak_above_start(run)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return losses, graphs, peak


def on_ranks(plan: Plan) -> list[Any]:
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # torch's own, of its imports
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # dynamo looks
    found = []
    for engine in ENGINES.values():
        net = osdp.parallelize(model(), plan, engine=engine)
        losses, graphs, peak = trained(net)
        total = torch.tensor(losses)
        dist.all_reduce(total)
        held = sum(p.to_local().nbytes for p in net.parameters())  # type: ignore[attr-defined]
        bytes_held = peak + held if engine == plan.cluster.engine else 0
        found.append(((total / 2).tolist(), graphs, bytes_held, whole_parameters(net)))
    return found


def test_two_ranks_train_compiled_blocks_as_one_process_does_and_compile_once() -> None:
    made = plan_by_hand(
        graph(),
        "2",
        modes=(FREE, KEEP, REPLICATE),
        recompute=(False, True, Recompute.SELECTIVE, False),
        optimizer="sgd",
    )
    plan = replace(made, compiled=True)
    alone = model()
    truth, _, _ = trained(alone)
    weights = whole_parameters(alone)
    planned = step_graph_of(plan, graph()).timeline().peak_bytes
    traced = step_graph_of(plan, graph(compiled=True)).timeline().peak_bytes
    for runs in run_ranks(2, on_ranks, plan, timeout_seconds=500):
        for losses, graphs, peak, own in runs:
            torch.testing.assert_close(losses, truth, rtol=1e-5, atol=0)
            for name, true in weights.items():
                torch.testing.assert_close(own[name], true, rtol=1e-4, atol=1e-6, msg=name)
            # four blocks in three modes: one graph for those recomputed and not, one for the selectively recomputed
            assert graphs[0] == graphs[-1] == 2
            assert peak <= planned
            assert peak <= traced


def test_a_compiled_plan_says_so_and_is_priced_as_such() -> None:
    example = torch.zeros(1, 64, dtype=torch.long)
    way = {"batch": 2, "recompute": False}
    eager, fused = (
        osdp.plan(model(), (example, example), "2xA100-80GB", compiled=each, **way) for each in (False, True)
    )
    assert not eager.compiled and fused.compiled and Plan.from_dict(fused.to_dict()) == fused
    assert fused.predicted.step_seconds < eager.predicted.step_seconds
    assert {unit.name for unit in fused.units if unit.block} == {f"blocks.{i}" for i in range(4)}
    assert plan_page(fused).compiled and fused.digest != replace(fused, compiled=False).digest
    training = Training.of(compiled=True)
    assert training.of_stage(is_block=True).compiled and not training.of_stage(is_block=False).compiled


def test_a_compiled_block_in_parts_is_refused() -> None:
    plan = replace(plan_by_hand(graph(), "2", modes=(FREE,), granularity=OPERATORS), compiled=True)
    with pytest.raises(UsageError, match=r"is a part of block 'blocks\.0', which the plan compiles as a whole"):
        Plan.from_dict(plan.to_dict())


def test_without_a_compiler_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"there is no no-such-compiler; install one, or plan without --compiled"):
        compiled.compile_blocks([nn.Linear(1, 1)], torch.device("cpu"))
