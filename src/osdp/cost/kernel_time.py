"""Seconds of kernels by their kind.

[Note: Kernel rates]
On an accelerator whose figures are known (`Device.attention_efficiency` is stated) a kernel takes

    product     FLOPs / (peak · matmul_efficiency)    + matmul_traffic · bytes / memory rate
    attention   FLOPs / (peak · attention_efficiency) + bytes / memory rate
    any other   bytes / memory rate

The first term is the efficiency that large kernels reach, the second what small ones lose: a product of m × k by k × n
does 1 / (1/m + 1/n + 1/k) FLOPs a byte, so narrow models and few tokens run below the peak's efficiency, and attention
over short sequences too. Causal attention counts the half of the products that its kernel does. The host issues
kernels ahead of the device, so a pass takes what the host needs for its kernels if that is longer.

Ranks wait for each other at every collective, so that all compute at the pace of the slowest. Devices of one kind
differ by `speed_spread`, and the slowest of n lies the further below the mean the more there are.

Compiled code fuses what lies between products: a row of kernels that move bytes becomes one that moves what the largest
of them did.

Where a profile measured the device, or on CPUs, a kernel takes its FLOPs or its bytes, whichever is longer, and a
launch: the profile's figures were fitted to that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from osdp.cluster import Cluster, Device
from osdp.model.graph import FloatArray, IntArray
from osdp.model.kernels import KernelKind


class KernelTime:
    """Seconds of a row of kernels at any batch size; `flops` and `moved` are (constant, per sample) rows."""

    def __init__(
        self, flops: IntArray, moved: IntArray, kinds: IntArray, cluster: Cluster, dtype: str, *, compiled: bool
    ) -> None:
        device = cluster.device
        self._by_kind = device.attention_efficiency > 0
        issued = np.ones(len(flops), dtype=bool)
        if compiled and self._by_kind:
            issued = _largest_of_rows(moved, kinds)
            moved = np.where(issued[:, None], moved, 0)
        self._flops, self._moved = flops, moved
        self._launch_seconds = device.kernel_seconds
        self._launches = int(issued.sum())
        self._slowest = cluster.slowest_factor
        rates = _rates(kinds, device, dtype) if self._by_kind else _roofline(len(flops), device, dtype)
        self._flop_seconds, self._byte_seconds = rates

    def each(self, batch: int) -> FloatArray:
        """Seconds of every kernel; those that are part of another one take none."""
        size = np.array([1.0, batch])
        products, bytes_moved = self._flops @ size * self._flop_seconds, self._moved @ size * self._byte_seconds
        if not self._by_kind:
            return np.maximum(products, bytes_moved) + self._launch_seconds
        seconds = (products + bytes_moved) * self._slowest
        total, issuing = float(seconds.sum()), self._launches * self._launch_seconds
        if total >= issuing:
            return seconds
        # the host is late: each kernel waits for its share of that
        return seconds * (issuing / total) if total else np.full(len(seconds), issuing / max(1, len(seconds)))


def _roofline(kernels: int, device: Device, dtype: str) -> tuple[FloatArray, FloatArray]:
    flop_seconds = device.matmul_seconds(1e12, dtype) / 1e12
    return np.full(kernels, flop_seconds), np.full(kernels, device.memory_seconds(1e12) / 1e12)


def _rates(kinds: IntArray, device: Device, dtype: str) -> tuple[FloatArray, FloatArray]:
    """Seconds of each kernel's FLOPs and bytes; see [Note: Kernel rates]."""
    product = device.matmul_seconds(1e12, dtype) / 1e12
    attention = device.attention_seconds(1e12, dtype) / 1e12
    byte = device.memory_seconds(1e12) / 1e12
    flop_seconds, byte_seconds = np.zeros(len(KernelKind)), np.full(len(KernelKind), byte)
    flop_seconds[KernelKind.MATMUL], byte_seconds[KernelKind.MATMUL] = product, byte * device.matmul_traffic
    flop_seconds[KernelKind.ATTENTION] = attention
    flop_seconds[KernelKind.CAUSAL_ATTENTION] = attention / 2
    return flop_seconds[kinds], byte_seconds[kinds]


def _largest_of_rows(moved: IntArray, kinds: IntArray) -> NDArray[np.bool_]:
    """Of every row of memory-bound kernels the one that moves most, and all others that are none."""
    memory = kinds == KernelKind.MEMORY
    chosen = ~memory
    starts = np.flatnonzero(memory & ~np.concatenate([[False], memory])[: len(memory)])
    stops = np.flatnonzero(memory & ~np.concatenate([memory, [False]])[1:]) + 1
    for first, stop in zip(starts, stops, strict=True):
        chosen[first + int(np.argmax(moved[first:stop].sum(axis=1)))] = True
    return chosen
