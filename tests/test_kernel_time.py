"""Kernels take seconds by their kind: products, attention and what moves bytes; see [Note: Kernel rates].

CPUs and profiled devices keep the simple rule; causal attention does half the products; small kernels reach less;
compiled code fuses rows of memory-bound kernels; all wait for the slowest of many devices.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdp.cluster import Cluster
from osdp.cluster.slowest import expected_largest
from osdp.cost.kernel_time import KernelTime
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.kernels import KernelKind

ONE = Cluster.of("A100-80GB")
PEAK = ONE.device.peak_flops["bf16"]
BYTE = ONE.device.memory_seconds(1.0)


def seconds(*kernels: tuple[KernelKind, int, int], cluster: Cluster = ONE, compiled: bool = False) -> float:
    """Of kernels with so many FLOPs and bytes for a sample, at batch 1, without what the host takes to issue them."""
    quick = replace(cluster, device=replace(cluster.device, kernel_seconds=0.0))
    rows = [np.array([[0, kernel[place]] for kernel in kernels]).reshape(-1, 2) for place in (1, 2)]
    kinds = np.array([int(kernel[0]) for kernel in kernels], dtype=np.int64)
    return float(KernelTime(rows[0], rows[1], kinds, quick, "bf16", compiled=compiled).each(1).sum())


def test_each_kind_has_its_rate() -> None:
    flops, moved = 10**12, 10**9
    device = ONE.device
    product = flops / (PEAK * device.matmul_efficiency) + device.matmul_traffic * moved * BYTE
    whole = flops / (PEAK * device.attention_efficiency) + moved * BYTE
    causal = flops / 2 / (PEAK * device.attention_efficiency) + moved * BYTE
    expected = {
        KernelKind.MEMORY: moved * BYTE,
        KernelKind.MATMUL: product,
        KernelKind.ATTENTION: whole,
        KernelKind.CAUSAL_ATTENTION: causal,
    }
    for kind, alone in expected.items():
        assert seconds((kind, flops, moved)) == pytest.approx(alone, rel=1e-12), kind
    assert seconds(*((kind, flops, moved) for kind in expected)) == pytest.approx(sum(expected.values()), rel=1e-12)


def test_small_products_and_short_sequences_reach_less_of_the_peak() -> None:
    def product(width: int) -> float:
        return 2 * width**3 / seconds((KernelKind.MATMUL, 2 * width**3, 6 * width**2)) / PEAK

    def attention(length: int) -> float:
        flops = 4 * length**2 * 128
        return flops / 2 / seconds((KernelKind.CAUSAL_ATTENTION, flops, 8 * length * 128)) / PEAK

    for reached, sizes in ((product, (256, 1024, 4096, 16384)), (attention, (512, 2048, 8192, 65536))):
        found = [reached(size) for size in sizes]
        assert found == sorted(found)
        assert found[0] < 0.8 * found[-1]


def test_a_pass_takes_at_least_what_the_host_needs_to_issue_it() -> None:
    none, kinds = np.zeros((100, 2), dtype=np.int64), np.zeros(100, dtype=np.int64)
    time = KernelTime(none, none, kinds, ONE, "bf16", compiled=False)
    assert time.each(1).sum() == pytest.approx(100 * ONE.device.kernel_seconds)


def test_cpus_and_profiled_devices_keep_the_simple_rule() -> None:
    flops, moved = np.array([[5, 10**9], [0, 0]]), np.array([[7, 10**6], [0, 10**8]])
    kinds = np.array([KernelKind.CAUSAL_ATTENTION, KernelKind.MEMORY])
    for cluster in (Cluster.of("CPU"), replace(ONE, device=replace(ONE.device, attention_efficiency=0.0))):
        device = cluster.device
        expected = sum(
            max(device.matmul_seconds(a + 3 * b, "bf16"), device.memory_seconds(c + 3 * d)) + device.kernel_seconds
            for (a, b), (c, d) in zip(flops.tolist(), moved.tolist(), strict=True)
        )
        for compiled in (False, True):
            time = KernelTime(flops, moved, kinds, cluster, "bf16", compiled=compiled)
            assert time.each(3).sum() == pytest.approx(expected, rel=1e-12)


def test_compiled_code_moves_what_the_largest_of_a_row_does() -> None:
    row = [(KernelKind.MEMORY, 0, size) for size in (10**8, 3 * 10**8, 2 * 10**8)]
    product = (KernelKind.MATMUL, 10**12, 10**8)
    eager, compiled = seconds(*row, product, *row), seconds(*row, product, *row, compiled=True)
    largest = (KernelKind.MEMORY, 0, 3 * 10**8)
    assert compiled == pytest.approx(seconds(largest, product, largest), rel=1e-12)
    assert compiled < eager
    assert seconds(compiled=True) == 0.0


def test_all_compute_at_the_pace_of_the_slowest_of_many() -> None:
    kernel = (KernelKind.MATMUL, 10**12, 10**9)
    alone = seconds(kernel)
    found = [seconds(kernel, cluster=replace(ONE, nodes=n, devices_per_node=8)) / alone for n in (1, 2, 16, 64)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1 + ONE.device.speed_spread * expected_largest(8))
    assert expected_largest(1) == 0
    draws = np.random.default_rng(0).standard_normal((20000, 64)).max(axis=1).mean()
    assert expected_largest(64) == pytest.approx(draws, rel=0.02)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.linear, self.causal = nn.Linear(16, 16), causal

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal).square().mean()


def kinds(graph: ModelGraph) -> list[int]:
    passes = [segment for stage in graph.stages for segment in (*stage.plain.forward, *stage.plain.backward)]
    assert all(len(segment.kinds) == len(segment.flops) for segment in passes)
    return [int(kind) for segment in passes for kind in segment.kinds]


@pytest.mark.parametrize(
    ("causal", "kind"), [(True, KernelKind.CAUSAL_ATTENTION), (False, KernelKind.ATTENTION)], ids=["causal", "whole"]
)
def test_a_capture_tells_kernels_apart(causal: bool, kind: KernelKind) -> None:
    found = kinds(capture(Attention(causal), (torch.empty(2, 6, 16),)))
    assert found.count(kind) == 2  # forward and backward
    assert found.count(KernelKind.MATMUL) == 2  # forward and the weight's gradient
    assert KernelKind.MEMORY in found
    assert set(found) == {KernelKind.MEMORY, KernelKind.MATMUL, kind}
