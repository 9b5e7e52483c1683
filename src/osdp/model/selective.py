"""Blocks under torch's checkpoint: as tracing, profiling and the runtime all run them.

[Note: Selective]
A selective checkpoint keeps what expensive kernels put out and computes the cheap ones between them again: norms,
activations, rotary embeddings, residuals, casts. What is kept: products with a weight, convolutions, and attention that
is one fused kernel. Batched products are not: in attention that is not fused they put out scores of length times
length, which are what people recompute to get rid of.

torch counts every operator in the block's forward and expects the same in the second one. FSDP2's own operators are
among them where units lie inside the block, and they differ: the first forward gathers ahead, the second may not. So
only blocks that are one unit, not split, are recomputed selectively.

A selective checkpoint allows one backward through its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from osdp.model.input_on_host import Host, RealHost, with_input_on_host
from osdp.recompute import Recompute

_ATEN = torch.ops.aten
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_mm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Contexts:
    """What a selectively recomputed block's forward runs in, and what its second one does; see [Note: Selective]."""
    return create_selective_checkpoint_contexts(_policy)


def checkpointed(
    forward: Callable[..., Any], how: Recompute, *, host: Host | None = None, **options: Any
) -> Callable[..., Any]:
    """A block's forward under a checkpoint; `options` go to torch's."""
    if how is Recompute.SELECTIVE:
        options = {"context_fn": selective_contexts, **options}
    run = functools.partial(checkpoint, forward, use_reentrant=False, **options)
    return with_input_on_host(run, host or RealHost()) if how is Recompute.ON_HOST else run
