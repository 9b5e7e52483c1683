"""Adapters and frozen parts are planned as what they are, with real PEFT.

- A frozen base has no gradients and no optimizer states, and no reduction of it is priced or issued.
- On real ranks, under plans of every mode, slices and recompute, adapters train as in a single process.
- The timeline and the collectives are those of the dry run where every unit that acts in backward has a gradient.
- The page says how many parameters are trained.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from rich.console import Console
from torch import Tensor, nn
from trained import EVERY_MODE, Trained, same
from transformers import LlamaConfig, LlamaForCausalLM

import osdp
from osdp.cost.graph import step_graph_of
from osdp.cost.units import OPERATORS, PARTS, WHOLE
from osdp.model.capture import capture, scaled_inputs
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.report.page import plan_page
from osdp.report.terminal import print_plan
from osdp.sharding import FREE, KEEP, REPLICATE
from osdp.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")
STEPS, BATCH = 2, 4
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adapted(*, embedding: bool = False) -> nn.Module:
    """A tiny Llama with adapters on two of its products; with `embedding`, the embedding is trained too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=48, use_cache=False)).train()
    more = ["embed_tokens"] if embedding else None
    model: Any = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=more)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide what comes before them
            nn.init.normal_(parameter, std=0.1)
    return model


def batch(samples: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 48, (samples, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


@cache
def graph(*, embedding: bool = False) -> ModelGraph:
    return capture(adapted(embedding=embedding), batch(2, 0), compute_dtype="fp32")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(model: nn.Module, make: MakeOptimizer) -> Trained:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        own = {key: value.chunk(ranks)[rank] for key, value in batch(BATCH, step).items()}
        loss = model(**own).loss
        loss.backward()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        gradients = whole_gradients(model)
        optimizer.step()
    assert all((gradient is None) == ("lora" not in name) for name, gradient in gradients.items())
    return Trained(losses, gradients, whole_parameters(model))


def on_ranks(plans: list[Plan], make: MakeOptimizer) -> list[Trained]:
    return [train(osdp.parallelize(adapted(), plan), make) for plan in plans]


# AdamW divides by gradients next to zero: in one process too, weights that are one rounding off move it by 1e-5.
@pytest.mark.parametrize(("make", "tolerance"), [(sgd, 1e-5), (adamw, 2e-5)])
def test_adapters_train_as_in_a_single_process(make: MakeOptimizer, tolerance: float) -> None:
    modes = EVERY_MODE[:3]
    plans = [
        plan_by_hand(graph(), "2", modes=modes, granularity=WHOLE, recompute=(True, False)),
        plan_by_hand(graph(), "2", modes=modes[1:] + modes[:1], granularity=PARTS),
        plan_by_hand(graph(), "2", modes=modes[2:] + modes[:2], granularity=OPERATORS, splits=((2, 1), (1, 1))),
    ]
    truth = train(adapted(), make)
    for runs in run_ranks(2, on_ranks, plans, make):
        for run in runs:
            same(run, truth, tolerance)


@pytest.mark.parametrize("granularity", [WHOLE, PARTS, OPERATORS])
def test_what_is_trained_before_every_gradient_is_left_with_its_block(granularity: str) -> None:
    """The adapters of the first block: no input of theirs has a gradient, so backward leaves them at its end."""
    plan = plan_by_hand(graph(), "4", modes=(REPLICATE,), granularity=granularity, recompute=(True, False))
    step = step_graph_of(plan, graph())
    found = verify(plan, graph(), build=adapted, inputs=scaled_inputs(batch(2, 0)), loss=None)
    assert found.first_difference is None
    assert found.measured_peak_bytes == step.timeline().peak_bytes
    reduced = sum(each.nbytes for each in found.issued if each.kind == "all_reduce")
    assert reduced == 4 * sum(p.numel for p in graph().parameters.values() if p.trainable)


def test_a_trained_embedding_before_a_frozen_base() -> None:
    model = graph(embedding=True)
    plan = plan_by_hand(model, "4", modes=(FREE, KEEP, REPLICATE), granularity=WHOLE)
    inputs = scaled_inputs(batch(2, 0))
    found = verify(plan, model, build=lambda: adapted(embedding=True), inputs=inputs, loss=None)
    assert found.first_difference is None
    assert found.measured_peak_bytes == step_graph_of(plan, model).timeline().peak_bytes


@pytest.mark.parametrize("granularity", [WHOLE, OPERATORS])
def test_what_is_frozen_before_every_gradient_stays_until_backward_has_ended(granularity: str) -> None:
    """The embedding and the first products: no gradient passes them, and no hook of FSDP2 frees them before."""
    for modes, again in (((KEEP,), False), ((KEEP, FREE, REPLICATE), True), ((FREE, KEEP, REPLICATE), False)):
        plan = plan_by_hand(graph(), "4", modes=modes, granularity=granularity, recompute=(again,))
        found = verify(plan, graph(), build=adapted, inputs=scaled_inputs(batch(2, 0)), loss=None)
        assert found.first_difference is None
        assert found.measured_peak_bytes == step_graph_of(plan, graph()).timeline().peak_bytes


def test_a_frozen_base_costs_no_states_and_no_reductions() -> None:
    trained = sum(parameter.numel for parameter in graph().parameters.values() if parameter.trainable)
    plan = osdp.plan(adapted(), batch(2, 0), "2xCPU", batch=2, precision="fp32", modes=[REPLICATE], recompute=False)
    states = plan.predicted.memory_parts["optimizer states"]
    assert 8 * trained <= states < 9 * trained
    assert plan.model.trained == trained < plan.model.parameters / 10
    out = io.StringIO()
    print_plan(plan_page(plan), Console(file=out, width=120))
    assert "of them trained" in out.getvalue()
