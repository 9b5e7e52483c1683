"""Claims: what kernels allocate while they run on a CPU is no more than a plan counts, and it counts where they run.

Matrix products in 16 bits by a bound ([Note: Workspaces] in osdp.model.kernels), convolutions as they are measured
([Note: Measured space] in osdp.model.measured_space).
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from osdp.cpu_memory import peak_above_start
from osdp.model.capture import capture
from osdp.model.kernels import DEEP, WORKSPACE_BYTES, product_workspace, transposed_depth


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


class Convolving(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).sum()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("convolution", "shape"),
    [(nn.Conv2d(3, 32, 4, 4), (3, 16, 16)), (nn.Conv2d(16, 32, 3, padding=1), (16, 16, 16))],
)
def test_convolutions_take_what_is_counted_at_batch_sizes_that_were_not_traced(
    convolution: nn.Module, shape: tuple[int, ...], dtype: str
) -> None:
    """Here the space is most of what a step takes: 16,384 of 16,648 bytes of the patches of two small images."""
    model, threads = Convolving(convolution), torch.get_num_threads()
    [stage] = capture(model, (torch.zeros(2, *shape),), compute_dtype=dtype, held_dtype=dtype).stages
    model = Convolving(convolution).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.set_num_threads(1)
    try:
        for batch in (1, 4, 40):
            x = torch.zeros(batch, *shape, dtype=next(model.parameters()).dtype)

            def step(x: Tensor = x) -> None:
                model(x).backward()
                model.zero_grad()

            step()
            saved = stage.plain.forward_delta.at(batch)
            forward, backward = (
                max(segment.peak_at(batch, workspaces=True) for segment in segments)
                for segments in (stage.plain.forward, stage.plain.backward)
            )
            counted = max(forward, saved + backward + gradients)
            taken = min(peak_above_start(step) for _ in range(2))
            assert taken <= counted <= 2.5 * taken, batch
    finally:
        torch.set_num_threads(threads)
