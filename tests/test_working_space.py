"""Claims: matrix products in 16 bits allocate no more than plans for CPUs count, and that counts where they run.

See [Note: Workspaces] in osdp.model.kernels.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from osdp.model.capture import capture
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


def test_working_space_counts_at_the_level_of_its_product() -> None:
    class Wide(nn.Module):
        """The highest level is far above that of the product, whose depth in backward is that of 700 rows a sample."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            wide = (x * self.scale).unsqueeze(-1).repeat(1, 1, 1, 200).square()
            return (wide.sum(-1) @ self.weight).sum()

    [stage] = capture(Wide(), (torch.zeros(2, 700, 16),)).stages
    highest = max(stage.plain.backward, key=lambda segment: segment.peak_at(2))
    assert any(line.at(2) >= DEEP for line in highest.depths)
    assert highest.peak_at(2, workspaces=True) == highest.peak_at(2)
