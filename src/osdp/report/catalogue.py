"""What is known by name, as rows: models and devices. No torch."""

from __future__ import annotations

from typing import NamedTuple

from osdp.cluster import devices
from osdp.model.source import presets


class ModelRow(NamedTuple):
    name: str
    kind: str
    description: str
    parameters: int
    seq_len: int | None
    source: str


class DeviceRow(NamedTuple):
    name: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    memory_bytes_per_second: float
    node_link: str
    node_bytes_per_second: float
    network_bytes_per_second: float
    basis: str


def model_rows() -> list[ModelRow]:
    return [
        ModelRow(each.name, each.kind, each.description, each.parameters, each.seq_len, each.source)
        for each in presets().values()
    ]


def device_rows() -> list[DeviceRow]:
    return [
        DeviceRow(
            name=each.name,
            memory_bytes=each.memory_bytes,
            bf16_flops=each.peak_flops["bf16"],
            fp32_flops=each.peak_flops["fp32"],
            memory_bytes_per_second=each.memory_bytes_per_second,
            node_link=each.node_link.name,
            node_bytes_per_second=each.node_link.bytes_per_second,
            network_bytes_per_second=each.network.bytes_per_second,
            basis=each.basis,
        )
        for each in devices()
    ]
