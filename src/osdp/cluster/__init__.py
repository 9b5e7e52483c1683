"""What the machines are: devices, links, and what a collective between them costs. No torch."""

from osdp.cluster.cluster import Cluster
from osdp.cluster.device import DTYPES, KERNELS, Device, device, devices
from osdp.cluster.link import GROUPS, KINDS, Link, Measured, wire_bytes
from osdp.cluster.measured import TimedOptimizer, TimedStage
from osdp.cluster.sizes import format_bytes, parse_bytes, parse_rate

__all__ = [
    "DTYPES",
    "GROUPS",
    "KERNELS",
    "KINDS",
    "Cluster",
    "Device",
    "Link",
    "Measured",
    "TimedOptimizer",
    "TimedStage",
    "device",
    "devices",
    "format_bytes",
    "parse_bytes",
    "parse_rate",
    "wire_bytes",
]
