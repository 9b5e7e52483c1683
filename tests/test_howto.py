"""Pages that are about training do what they say: their own code, on two real ranks, compared with a single process."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import graph_of, tiny
from frameworks import samples
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from test_docs import ROOT, blocks
from torch import Tensor

import osdp
from osdp.model.gpt import GPT, GPTConfig
from osdp.planfile import Plan
from osdp.sharding import FREE, KEEP, REPLICATE

ROWS = 4  # of a rank: two good answers, two bad ones


def block(page: str, part: str) -> str:
    (found,) = (each for each in blocks(ROOT / "docs/howto" / page) if part in each)
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


# ---- blocks of other pages, on one set of ranks


def page_block(page: str, part: str) -> str:
    (found,) = (each for each in blocks(ROOT / page) if part in each)
    return found


def on_meta() -> Any:
    with torch.device("meta"):
        return built(0)


def run_pages(folder: Path, llama: Plan) -> list[str]:
    """Runs blocks of pages as they stand, in a folder with stored weights; gives what they left there."""
    os.chdir(folder)
    rank, batch = dist.get_rank(), {"input_ids": rows(dist.get_rank()), "labels": rows(dist.get_rank())}
    space: dict[str, Any] = {"osdp": osdp, "torch": torch, "dist": dist, "plan": llama, "batch": batch}

    def run(page: str, part: str, **names: Any) -> None:
        text = page_block(page, part).replace('dist.init_process_group("cpu:gloo,cuda:nccl")\n', "")
        text = re.sub(r"torch\.cuda\.set_device\(.*\)\n", "", text).replace('device="cuda"', 'device="cpu"')
        space.update(names)
        exec(text, space)

    run("README.md", "osdp.load_pretrained", model=on_meta())
    run("docs/weights.md", "osdp.load_pretrained", model=on_meta())
    run("docs/howto/fine-tune.md", "AutoConfig", data=[[batch] * llama.accumulation])
    run("docs/howto/evaluation-and-ema.md", "model.eval()", validation=[batch])
    assert space["model"].training and space["losses"][0].requires_grad is False
    space["model"](**batch).loss.backward()
    run("docs/howto/evaluation-and-ema.md", "MovingAverage", evaluate=lambda model: model(**batch))
    run("docs/howto/resume-on-fewer.md", "load_checkpoint", model=on_meta())
    assert space["done"] is None
    small = GPT(GPTConfig(vocab_size=64, positions=8, layers=(2,), widths=(32,), head_width=16))
    tokens = torch.arange(8).repeat(2, 1) + rank
    data = [[(tokens, tokens)] * 2]
    run("docs/running.md", "osdp.start()", model=copy.deepcopy(small), example_inputs=(tokens, tokens), data=data)
    if rank == 0:
        space["plan"].save("plan.json")
    dist.barrier()
    run("docs/tutorial.md", "osdp.start()", build=lambda: GPT(small.config), data=data)
    return sorted(str(path) for path in Path().glob("*/*.safetensors"))


def test_blocks_of_pages_run_as_they_stand(tmp_path: Path) -> None:
    built(3).save_pretrained(tmp_path / "Qwen3-8B")
    (tmp_path / "qwen").symlink_to("Qwen3-8B")
    llama = plan_by_hand(graph_of("llama"), "2", modes=(FREE, REPLICATE, KEEP), batch_size=ROWS)
    llama.save(tmp_path / "plan.json")
    for found in run_ranks(2, run_pages, tmp_path, llama, timeout_seconds=100):
        assert found == [f"{each}/model.safetensors" for each in ("Qwen3-8B", "averaged", "out", "qwen", "tuned")]
