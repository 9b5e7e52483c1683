"""The ranks that run, as a cluster."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from osdp.accelerator import DeviceCalls, training_device
from osdp.cluster import Cluster
from osdp.errors import UsageError


def this_cluster(
    *, memory_bytes: int | None = None, device: torch.device | None = None, ranks_per_node: int | None = None
) -> Cluster:
    """The ranks that run: on this accelerator, or on CPUs that share half the machine's memory; without any, this one.

    Nodes are as torchrun says, in LOCAL_WORLD_SIZE, or else there is one.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    each = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % each:
        raise UsageError(f"{ranks} ranks do not divide into nodes of {each}; start as many on every node")
    device = device or training_device()
    if device.type == "cpu" and memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // each
    return Cluster.of(DeviceCalls(device).name, nodes=ranks // each, devices_per_node=each, memory=memory_bytes)
