"""The pages on DPO and on lengths train as a single process does: their own code, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import graph_of, tiny
from frameworks import samples
from pages import blocks
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor

import osdp
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE

ROWS = 4  # of a rank: two good answers, two bad ones


def block(page: str, part: str) -> str:
    (found,) = (each.text for each in blocks(f"docs/howto/{page}") if part in each.text)
    return found


def built(seed: int) -> Any:
    torch.manual_seed(seed)
    return tiny("llama").build().train()


def rows(rank: int) -> Tensor:
    return torch.stack([each["input_ids"] for each in samples()[rank * ROWS : (rank + 1) * ROWS]])


def preferred(plan: Plan) -> tuple[float, dict[str, Tensor]]:
    batch = {"input_ids": rows(dist.get_rank()), "answer_mask": torch.ones(ROWS, 8)}
    space = {"osdp": osdp, "torch": torch, "plan": plan, "policy": built(1), "reference": built(2), "batch": batch}
    exec(block("dpo.md", "def answers"), space)
    return space["loss"].item(), whole_parameters(space["policy"])


def test_the_page_on_dpo_trains_as_a_single_process_does() -> None:
    plan = plan_by_hand(graph_of("llama"), "2", modes=(FREE, REPLICATE, KEEP), splits=((1, 1), (2, 2)), batch_size=ROWS)
    found = run_ranks(2, preferred, plan)
    policy, reference = built(1), built(2)
    text = block("dpo.md", "def answers").replace("osdp.parallelize", "(lambda *unused: None)")
    halves = [rows(rank).chunk(2) for rank in range(2)]
    tokens = torch.cat([*(good for good, _ in halves), *(bad for _, bad in halves)])
    batch = {"input_ids": tokens, "answer_mask": torch.ones(2 * ROWS, 8)}
    space = {"osdp": osdp, "torch": torch, "plan": plan, "policy": policy, "reference": reference, "batch": batch}
    exec(text, space)
    assert sum(loss for loss, _ in found) / 2 == pytest.approx(space["loss"].item(), abs=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[0][1][name], parameter.detach(), rtol=1e-4, atol=2e-5)


def weighted(plan: Plan) -> dict[str, Tensor]:
    """Ranks have samples of different lengths."""
    model = osdp.parallelize(built(1), plan)
    tokens = rows(dist.get_rank())[:, : 8 - 3 * dist.get_rank()]
    logits = model(input_ids=tokens).logits[:, :-1]
    token_losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    batch = {"mask": torch.ones_like(tokens[:, 1:])}
    space = {"torch": torch, "dist": dist, "batch": batch, "token_losses": token_losses}
    exec(block("variable-lengths.md", "tokens_of_all"), space)
    space["loss"].backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return whole_parameters(model)


def test_the_page_on_lengths_gives_the_mean_over_all_tokens() -> None:
    plan = plan_by_hand(graph_of("llama"), "2", modes=(FREE, REPLICATE, KEEP), batch_size=ROWS)
    found, _ = run_ranks(2, weighted, plan)
    model = built(1)
    losses = []
    for rank in range(2):
        tokens = rows(rank)[:, : 8 - 3 * rank]
        logits = model(input_ids=tokens).logits[:, :-1]
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        )
    torch.cat(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5)
