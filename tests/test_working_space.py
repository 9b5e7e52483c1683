"""Claim: matrix products in 16 bits allocate no more than plans for CPUs count.

See [Note: Workspaces] in osdp.model.kernels.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from osdp.model.kernels import DEEP, WORKSPACE_BYTES, product_workspace, transposed_depth
from osdp.profiling.trial import peak_above_start


def drawn(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Two matrices, each transposed or not, with sizes that are multiples of 8 or not."""
    rows, depth, columns = (draw.choice((draw.randint(1, 700), 8 * draw.randint(1, 90))) for _ in range(3))
    first = torch.zeros(depth, rows).t() if draw.random() < 0.5 else torch.zeros(rows, depth)
    second = torch.zeros(columns, depth).t() if draw.random() < 0.5 else torch.zeros(depth, columns)
    return first.to(torch.bfloat16), second.to(torch.bfloat16)


def counted(first: Tensor, second: Tensor) -> int:
    """As a dry run counts it."""
    func, args = torch.ops.aten.mm.default, (first, second)
    deep = transposed_depth(func, args) >= DEEP
    return WORKSPACE_BYTES if deep else min(product_workspace(func, args), WORKSPACE_BYTES)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="measured on AVX-512 only")
def test_products_in_16_bits_take_no_more_than_is_counted() -> None:
    draw, threads = random.Random(0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(60):
            first, second = drawn(draw)
            torch.mm(first, second)  # the first of a shape also makes its kernel
            taken = peak_above_start(lambda first=first, second=second: torch.mm(first, second))
            taken -= 2 * first.shape[0] * second.shape[1]
            assert taken <= counted(first, second), (first.shape, first.stride(), second.shape, second.stride(), taken)
    finally:
        torch.set_num_threads(threads)
