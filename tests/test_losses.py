"""Cross entropy in chunks: the same loss without whole logits.

- Loss and gradients equal torch's, with ignored targets, in fp32 to rounding and in bf16 no worse than torch's own.
- What it allocates is a chunk's logits, and no more than its gradients beside.
- A plan states it and is dry-run to the byte; two real ranks train as one process with torch's loss does, GPT with tied
  weights and a Hugging Face model alike. A model whose loss is not known is refused.
- Asked for auto, the plan takes chunks where only they fit and leaves the loss alone where they gain nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned import plan_by_hand, whole_parameters
from ranks import run_ranks
from torch import Tensor, nn

import osdp
from osdp.cost.units import WHOLE
from osdp.errors import DoesNotFit, UsageError
from osdp.losses import ChunkedHead, chunk_loss, chunked_cross_entropy
from osdp.model.capture import capture
from osdp.model.gpt import GPT, GPTConfig
from osdp.planfile import Plan
from osdp.profiling.trial import peak_above_start
from osdp.report.page import plan_page
from osdp.sharding import FREE, KEEP
from osdp.verify import verify

CONFIG = GPTConfig(vocab_size=512, positions=24, layers=(2,), widths=(32,), head_width=16)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, 16, generator=draws).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=draws).to(dtype).requires_grad_()
    targets = torch.randint(50, (3, 10), generator=draws)
    targets[0, :4] = -100
    return hidden, weight, targets


def usual(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, -2), targets.flatten())


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * 4, of)]


@pytest.mark.parametrize("chunks", [1, 3, 4, 10, 99])
@pytest.mark.parametrize("flat", [False, True])
def test_loss_and_gradients_are_torchs(chunks: int, flat: bool) -> None:
    hidden, weight, targets = drawn()
    truth = gradients(usual(hidden, weight, targets), hidden, weight)
    given = (hidden.flatten(0, 1), weight, targets.flatten()) if flat else (hidden, weight, targets)
    found = gradients(chunked_cross_entropy(*given, chunks=chunks), hidden, weight)
    for own, true in zip(found, truth, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6)


def test_in_bf16_it_is_no_further_from_fp32_than_torch_is() -> None:
    low = drawn(torch.bfloat16)
    high = [t.detach().float().requires_grad_() if t.is_floating_point() else t for t in low]
    truth = gradients(usual(*high), *high[:2])
    found = gradients(chunked_cross_entropy(*low, chunks=5), *low[:2])
    torchs = gradients(usual(*low), *low[:2])
    for own, theirs, true in zip(found, torchs, truth, strict=True):
        assert own.dtype == theirs.dtype
        assert (own - true).norm() <= 1.1 * (theirs - true).norm()


def test_no_more_than_a_chunks_logits_is_allocated() -> None:
    hidden, weight = torch.randn(4, 64, 32, requires_grad=True), torch.randn(8192, 32, requires_grad=True)
    targets = torch.randint(8192, (4, 64))
    logits = 4 * 64 * 8192 * 4
    whole = peak_above_start(lambda: gradients(usual(hidden, weight, targets), hidden, weight))
    chunked = peak_above_start(
        lambda: gradients(chunked_cross_entropy(hidden, weight, targets, chunks=16), hidden, weight)
    )
    assert whole >= 2 * logits and chunked <= 2 * logits / 16 + 3 * weight.nbytes + 3 * hidden.nbytes


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, targets = drawn()
    with pytest.raises(UsageError, match=r"targets of \[10\] do not go together"):
        chunked_cross_entropy(hidden, weight, targets[0], chunks=2)
    with pytest.raises(UsageError, match="0 chunks are impossible; give 1 to 1024"):
        chunked_cross_entropy(hidden, weight, targets, chunks=0)
    with pytest.raises(UsageError, match="the loss of a Linear is not known to be"):
        chunk_loss(nn.Linear(2, 2), 4)


def many_words(chunks: int | str, model: nn.Module | None = None, **more: Any) -> Plan:
    example = torch.zeros(1, 64, dtype=torch.long)
    way = {"precision": "fp32", "batch": 8, "modes": ["free"], "recompute": False} | more
    return osdp.plan(model or with_many_words(), (example, example), "2xCPU", loss_chunks=chunks, **way)


def with_many_words() -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=4096, positions=64, layers=(2,), widths=(64,), head_width=16, tied=False))


@pytest.fixture(scope="module")
def without_and_with() -> list[Plan]:
    return [many_words(chunks) for chunks in (1, 8)]


def test_a_plan_states_it_needs_less_and_is_dry_run_to_the_byte(without_and_with: list[Plan]) -> None:
    plans, example = without_and_with, torch.zeros(1, 64, dtype=torch.long)
    with torch.device("meta"):
        graph = capture(chunk_loss(with_many_words(), 8), (example, example), compute_dtype="fp32")
    assert plans[1].predicted.peak_bytes < plans[0].predicted.peak_bytes / 2
    assert Plan.from_dict(plans[1].to_dict()).loss_chunks == 8 == plan_page(plans[1]).loss_chunks
    tokens = torch.empty(8, 64, dtype=torch.long, device="meta")
    found = verify(
        plans[1], graph, build=with_many_words, inputs=lambda batch: ((tokens, tokens), {}), loss=lambda out: out
    )
    assert found.error == 0 and found.collectives_match


def test_auto_takes_chunks_where_only_they_fit(without_and_with: list[Plan]) -> None:
    without, chunked = without_and_with
    limit = (without.predicted.peak_bytes + chunked.predicted.peak_bytes) // 2
    model = with_many_words()
    found = many_words("auto", model, memory=limit)
    assert found.loss_chunks == 8 and found.predicted.peak_bytes == chunked.predicted.peak_bytes
    assert found.predicted.samples_per_second == chunked.predicted.samples_per_second
    assert any(isinstance(module, ChunkedHead) for module in model.modules())  # it computes its loss as planned


def test_auto_leaves_the_loss_alone_where_chunks_gain_nothing(without_and_with: list[Plan]) -> None:
    without, chunked = without_and_with
    found = many_words("auto")
    assert found.loss_chunks == 1 and found.units == without.units
    bounds = [each.certificate.bound for each in (without, chunked)]
    assert found.certificate.bound == max(bounds)  # no plan of either space exceeds it


def test_auto_says_that_neither_fits(without_and_with: list[Plan]) -> None:
    with pytest.raises(DoesNotFit):
        many_words("auto", memory=without_and_with[1].predicted.peak_bytes // 2)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    ).train()


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    if isinstance(model, GPT):
        return model(tokens, tokens.roll(-1, 1))
    return model(input_ids=tokens, labels=tokens).loss


def trained(model: nn.Module, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.randint(512, (4, 24), generator=torch.Generator().manual_seed(step))
        loss_of(model, tokens.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(whole_parameters(model).values())


def on_ranks(plans: dict[str, Plan]) -> dict[str, list[Tensor]]:
    rank = torch.distributed.get_rank()
    found = {}
    for name, plan in plans.items():
        model = osdp.parallelize({"gpt": gpt, "llama": llama}[name](), plan)
        assert isinstance(model.get_submodule("head" if name == "gpt" else "lm_head"), ChunkedHead)
        found[name] = trained(model, rank, 2)
    return found


def test_two_ranks_train_as_one_process_with_torchs_loss() -> None:
    from dataclasses import replace

    example = torch.zeros(1, 24, dtype=torch.long)
    inputs = {"gpt": (example, example), "llama": {"input_ids": example, "labels": example}}
    plans, truth = {}, {}
    for name, build in (("gpt", gpt), ("llama", llama)):
        graph = capture(chunk_loss(build(), 5), inputs[name], compute_dtype="fp32")
        plans[name] = replace(
            plan_by_hand(graph, "2", modes=(FREE, KEEP), granularity=WHOLE, optimizer="sgd"), loss_chunks=5
        )
        truth[name] = trained(build())
    for found in run_ranks(2, on_ranks, plans, timeout_seconds=200):
        for name, weights in found.items():
            for own, true in zip(weights, truth[name], strict=True):
                torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6)
