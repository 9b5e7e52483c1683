"""An average of weights under a plan is the one of a single process; copies and plain saves say what to use instead."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import batch_of, graph_of, tiny
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor

import osdp
from osdp.errors import UsageError
from osdp.planfile import Plan
from osdp.runtime.average import MovingAverage
from osdp.sharding import FREE, KEEP, REPLICATE

DECAY, STEPS = 0.6, 3


def averaged(plan: Plan | None) -> tuple[dict[str, Tensor], dict[str, Tensor], float, list[str]]:
    torch.manual_seed(0)
    model = tiny("llama").build()
    said = []
    if plan is not None:
        osdp.parallelize(model, plan)
        for ask in (lambda: copy.deepcopy(model), lambda: model.save_pretrained("nowhere")):
            with pytest.raises(UsageError) as refused:
                ask()
            said.append(str(refused.value))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = MovingAverage(model, decay=DECAY)
    args, kwargs = batch_of("llama", 2, seed=0)
    for _ in range(STEPS):
        model(*args, **kwargs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    before = whole_parameters(model)
    with torch.no_grad(), average.applied():
        loss = model(*args, **kwargs).loss.item()
        inside = whole_parameters(model)
    after = whole_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return before, inside, loss, said


def test_an_average_under_a_plan_equals_that_of_a_single_process() -> None:
    plan = plan_by_hand(graph_of("llama"), "2", modes=(FREE, REPLICATE, KEEP), splits=((1, 1), (2, 1)))
    alone = averaged(None)
    for weights, inside, loss, said in run_ranks(2, averaged, plan):
        assert loss == pytest.approx(alone[2], abs=1e-5)
        for name in weights:
            torch.testing.assert_close(inside[name], alone[1][name], rtol=1e-4, atol=1e-5)
        assert any(not torch.allclose(inside[name], weights[name], atol=1e-3) for name in weights)
        assert "osdp.runtime.average.MovingAverage" in said[0] and "osdp.save_pretrained(model, folder)" in said[1]
    with pytest.raises(UsageError, match="decay is 2"):
        MovingAverage(torch.nn.Linear(2, 2), decay=2)
