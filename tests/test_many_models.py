"""Claim: what people train can be planned, with the memory that it then takes, and trains as in a single process.

- torch's own transformers, convolutions with batch norms, a diffusion UNet, a scan, an LSTM, a contrastive loss,
  experts that compute their own tokens, shared layers, a tower without inputs, one without a loss: a plan's peak is
  within 1 % of its dry run's;
- inputs may be lists, dataclasses and keywords, losses in dicts and tuples: nobody has to say where;
- what only data can tell is answered as training usually goes, and said.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_models import (
    LENGTH,
    MANY,
    WIDTH,
    Attention,
    Contrastive,
    ConvNeXt,
    Encoder,
    FromList,
    IdleTower,
    Mamba,
    Recurrent,
    ResNet,
    Routed,
    Shared,
    TwoTowers,
    UNet,
    many,
    sequence,
)
from planned import plan_by_hand, whole_gradients
from ranks import run_ranks
from torch import Tensor, nn

import osdp
from osdp.errors import UsageError
from osdp.model.capture import capture, scaled_inputs
from osdp.model.graph import ModelGraph
from osdp.model.inputs import as_call, map_tensors, output_loss
from osdp.model.values import EVEN_LOAD, FINITE, NOT_DROPPED
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE
from osdp.verify import verify

STEPS = 2


@cache
def graph_of(kind: type[nn.Module]) -> ModelGraph:
    return capture(many(kind), MANY[kind](), compute_dtype="fp32")


@pytest.mark.parametrize("kind", MANY)
def test_the_planned_peak_is_that_of_a_dry_run(kind: type[nn.Module]) -> None:
    example, graph = MANY[kind](), graph_of(kind)
    plan = osdp.plan(many(kind), example, "4xCPU", batch=2, precision="fp32")
    assert graph.num_parameters == sum(parameter.numel() for parameter in many(kind).parameters())
    inputs = scaled_inputs(example, model=many(kind))
    truth = verify(plan, graph, build=lambda: many(kind), inputs=inputs)
    assert truth.peak_matches, f"{truth.predicted_parts} but {truth.measured_parts}"
    assert truth.collectives_match, truth.first_difference


@pytest.mark.parametrize("kind", [Encoder, Attention, ResNet, ConvNeXt, UNet, Mamba, Routed])
def test_every_block_may_be_recomputed(kind: type[nn.Module]) -> None:
    graph = graph_of(kind)
    assert graph.blocks
    assert all(stage.recomputed is not None for stage in graph.blocks)


# ---- what is said


def test_a_batch_norm_over_one_value_is_measured_at_larger_batches() -> None:
    assert graph_of(ResNet).batches == (2, 3, 4)


def test_growth_that_is_no_line_makes_a_plan_for_one_batch() -> None:
    example = MANY[Contrastive]()
    assert capture(many(Contrastive), example, batch=5).only_batch == 5
    assert "holds for batch 5 only" in capture(many(Contrastive), example, batch=5).assumptions[0]
    plans = [osdp.plan(many(Contrastive), example, "4xCPU", batch=batch) for batch in (5, None)]
    assert [plan.batch_size for plan in plans] == [5, 2]  # by default the example's
    with pytest.raises(UsageError, match="measured at batch 2"):
        osdp.plan(many(Contrastive), example, "4xCPU", global_batch=64)


def test_what_only_data_can_tell_is_assumed_and_said_with_its_place() -> None:
    found = graph_of(Routed).assumptions
    assert {line.partition(" (")[0] for line in found} == {NOT_DROPPED, EVEN_LOAD, FINITE}
    places = {line.partition(" (")[0]: line.partition(" (")[2] for line in found}
    assert places[EVEN_LOAD].startswith("RoutedBlock, many_models.py:")
    assert places[NOT_DROPPED].startswith("Routed, many_models.py:")


def test_experts_get_the_same_share_of_the_tokens() -> None:
    experts = [op for name, op in graph_of(Routed).operators.items() if ".experts." in name]
    assert len(experts) == 8
    # 6 tokens of a sample choose 2 of 4 experts each: 3 for each expert
    assert {op.forward_flops.per_sample for op in experts} == {3 * 2 * WIDTH * WIDTH}


def test_parameters_that_the_loss_does_not_use_are_listed_and_held() -> None:
    graph = graph_of(TwoTowers)
    assert graph.unused == ("vision.weight", "vision.bias")
    plan = osdp.plan(many(TwoTowers), MANY[TwoTowers](), "4xCPU", batch=2)
    assert sum(unit.parameters for unit in plan.units) == graph.num_parameters
    seen = capture(
        many(TwoTowers), {**dict(zip(("x", "labels"), sequence(), strict=True)), "pixels": torch.ones(2, 3, 8, 8)}
    )
    assert seen.unused == ()


def test_a_list_is_one_input_where_the_model_takes_one() -> None:
    assert graph_of(FromList).operators["mix"].calls == 3


def test_a_failed_recompute_costs_that_block_the_option_only() -> None:
    class Remembering(nn.Linear):
        """Keeps its last output, as a cache does: its second forward is another one than its first."""

        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.last = out if self.last is None else torch.cat([self.last, out], 1)
            return torch.tanh(self.last)[:, : x.shape[1]]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Remembering(WIDTH, WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            self.blocks[1].last = None
            for block in self.blocks:
                x = block(x)
            return x.float().mean()

    graph = capture(Mixed(), (torch.randn(2, LENGTH, WIDTH),))
    assert [stage.recomputed is not None for stage in graph.blocks] == [True, False]
    assert any("Remembering blocks are not recomputed" in line for line in graph.assumptions)


# ---- on real ranks


def part_of(example: Any, part: int, parts: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(lambda tensor: tensor.chunk(parts)[part], as_call(example))


def trained(kind: type[nn.Module], model: nn.Module, part: int, parts: int) -> list[float]:
    """The losses of a few steps; the gradients of the last one stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(7)  # layer drop drops alike
        args, kwargs = part_of(MANY[kind](), part, parts)
        loss = output_loss(model(*args, **kwargs))
        loss.backward()
        total = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(total)
        losses.append(total.item() / parts)
        if step < STEPS - 1:
            optimizer.step()
    return losses


def on_a_rank(kind: type[nn.Module], plans: list[Plan]) -> list[tuple[list[float], dict[str, Tensor | None]]]:
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    found = []
    for plan in plans:
        model = osdp.parallelize(many(kind), plan)
        found.append((trained(kind, model, dist.get_rank(), dist.get_world_size()), whole_gradients(model)))
    return found


KINDS_ON_RANKS = [Encoder, Attention, Shared, UNet, ConvNeXt, Mamba, Recurrent, TwoTowers, IdleTower]


@pytest.mark.parametrize("kind", KINDS_ON_RANKS)
def test_two_ranks_train_as_one_process(kind: type[nn.Module]) -> None:
    plans = [
        plan_by_hand(
            graph_of(kind),
            "2",
            modes=(FREE, REPLICATE, KEEP)[index:] + (FREE, REPLICATE, KEEP)[:index],
            granularity=granularity,
            splits=((2, 1), (1, 1), (3, 3)),
            recompute=(True, False),
        )
        for index, granularity in enumerate(("whole", "parts", "operators"))
    ]
    alone = many(kind)
    losses = trained(kind, alone, 0, 1)
    truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in truth.values() if gradient is not None)
    for runs in run_ranks(2, on_a_rank, kind, plans, timeout_seconds=200):
        for own_losses, gradients in runs:
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert gradients.keys() == truth.keys()
            for name, true in truth.items():
                own = gradients[name]
                if true is None or own is None:
                    assert (own is None or not own.any()) and (true is None or not true.any()), name
                else:
                    assert float((own - true).abs().max()) < 1e-5 * max(float(true.abs().max()), 1e-2 * largest), name
