"""Whether a language head computes its loss in chunks, chosen by the plan: both are planned, the faster is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from osdp.errors import DoesNotFit
from osdp.losses import can_chunk, chunk_loss
from osdp.model.fake import copy_of
from osdp.planfile import Plan

CHUNKS = 8  # more save little: an eighth of the logits is less than a block's temporaries
WORTH_IT = 1.005  # times the rate without chunks: the user's own loss stays unless chunks gain


def plan_either(model: nn.Module, plan: Callable[[nn.Module, int], Plan]) -> Plan:
    """The faster of a plan without chunks and one with; the model computes its loss as the plan says from now on.

    The certificate's bound is the higher of the two: no plan of either space exceeds it.
    """
    found: list[Plan] = []
    misfit: DoesNotFit | None = None
    for chunks in (1, CHUNKS) if can_chunk(model) else (1,):
        try:
            found.append(plan(model if chunks == 1 else _without_memory(model), chunks))
        except DoesNotFit as error:
            misfit = error
    if not found:
        assert misfit is not None
        raise misfit
    first, last = found[0], found[-1]
    faster = last.predicted.samples_per_second > WORTH_IT * first.predicted.samples_per_second
    best = last if faster else first
    if best.loss_chunks > 1:
        chunk_loss(model, best.loss_chunks)
    bound = max(each.certificate.bound for each in found)
    rate = best.certificate.fastest_samples_per_second
    proof = replace(best.certificate, bound=bound, gap=max(0.0, 1 - rate / bound) if bound else 0.0)
    return replace(best, certificate=proof)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy_of(model, memo)
