"""A recomputed block draws the random numbers that it drew in forward, and what draws none keeps next to nothing."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from osdp.recompute import Recompute
from osdp.runtime.recompute import State, recompute


def blocks(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)))


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.ones(4, 8)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("share_draws", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("how", [Recompute.SELECTIVE, Recompute.FULL])
def test_a_recomputed_block_draws_what_it_drew(how: Recompute, dropout: float, share_draws: bool) -> None:
    expected = gradients(blocks(dropout))
    model = blocks(dropout)
    recompute([(block, how) for block in model], share_draws=share_draws)
    assert all(map(torch.equal, gradients(model), expected)) and len(expected) == 8
    after = torch.get_rng_state()
    gradients(blocks(dropout))
    assert torch.equal(torch.get_rng_state(), after)  # what follows draws as if nothing had been recomputed


@pytest.mark.parametrize(("dropout", "states"), [(0.0, 1), (0.5, 4)])
def test_blocks_that_draw_nothing_share_one_state(dropout: float, states: int) -> None:
    gc.collect()
    earlier = [each for each in gc.get_objects() if type(each) is State]  # of other tests

    def held() -> int:
        gc.collect()
        return sum(type(each) is State for each in gc.get_objects()) - len(earlier)

    before = held()
    model = blocks(dropout)
    recompute([(block, Recompute.FULL) for block in model], share_draws=True)
    loss = model(torch.ones(4, 8)).sum()
    assert held() - before == states
    loss.backward()
    del loss
    assert held() == before
