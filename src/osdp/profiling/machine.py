"""How the ranks lie on nodes, and what the device is called and holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from osdp.accelerator import DeviceCalls
from osdp.cluster import Cluster, Device, device
from osdp.errors import UsageError
from osdp.training.run import this_cluster
from osdp.training.world import World

_UNKNOWN = "A100-80GB"  # lends its form to a device that the catalogue lacks: every figure is measured


@dataclass(frozen=True)
class Machine:
    """The ranks as a cluster with the catalogue's figures; `catalogue` is None where it does not know the device."""

    cluster: Cluster
    catalogue: Device | None


def look_around(world: World, *, nodes: int | None, devices_per_node: int | None) -> Machine:
    """The ranks that run, as torchrun or the options say they lie."""
    nodes, devices_per_node = _shape(world, nodes, devices_per_node)
    known: Device | None
    calls = DeviceCalls(world.device)
    if calls.has_streams:
        name = calls.name
        try:
            known = device(name)
        except UsageError:
            known = None
        own = calls.memory_bytes
    else:
        name, known = "CPU", device("CPU")
        found = this_cluster(replace(world, local_size=devices_per_node), memory_bytes=None)
        own = found.memory_bytes or found.device.memory_bytes
    memory = int(min(row[0] for row in world.all_numbers(own)))
    form = known or replace(device(_UNKNOWN), name=name, note="", source={})
    cluster = Cluster.of(
        replace(form, memory_bytes=memory), nodes=nodes, devices_per_node=devices_per_node, overlap=form.overlap
    )
    return Machine(cluster, known)


def _shape(world: World, nodes: int | None, devices_per_node: int | None) -> tuple[int, int]:
    if nodes is None and devices_per_node is None:
        everyone = {int(row[0]) for row in world.all_numbers(world.local_size)}
        if len(everyone) > 1:
            raise UsageError(f"nodes have {sorted(everyone)} ranks; start as many on every node")
        return world.size // world.local_size, world.local_size
    nodes = nodes or world.size // (devices_per_node or 1)
    devices_per_node = devices_per_node or world.size // nodes
    if nodes * devices_per_node != world.size:
        raise UsageError(
            f"{nodes} nodes of {devices_per_node} devices are {nodes * devices_per_node} ranks but {world.size} run; "
            "correct --nodes or --devices-per-node"
        )
    return nodes, devices_per_node
