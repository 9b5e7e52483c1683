"""The device meshes and process groups of a plan, each built once and shared by all units, and by all plans of a world.

Every group has threads of its own that wake up now and then, on gloo a hundred times a second: a process that tries one
plan after another must not make them anew each time.

[Note: Engines]
On a backend with streams (NCCL), FSDP2's own communication overlaps compute: the stock engine leaves it alone, and
shards within the node on a two-dimensional mesh. On gloo, FSDP2 waits for every collective: the asynchronous engine
gives them to communication threads (see [Note: CommThreads]), and shards on the mesh of the node alone, as FSDP2 would
run the all-reduce of a two-dimensional mesh itself, and wait for it.
"""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from osdp._torch import default_timeout
from osdp.accelerator import FAKE
from osdp.engine import ASYNC_GLOO, Engine
from osdp.runtime.async_comm import CommThreads, Groups
from osdp.sharding import ShardingMode

LANES = 2  # see [Note: CommThreads]
_Key = tuple[str, int, int, Engine]
_made: dict[_Key, Meshes] = {}  # in the world of `_world`
_world: weakref.ref[dist.ProcessGroup] | None = None  # weak: when it is destroyed, what was made in it ends too


def meshes_of(device_type: str, nodes: int, devices_per_node: int, *, engine: Engine) -> Meshes:
    """The meshes of this world, the same at every call. Call it on every rank."""
    global _made, _world
    world = dist.group.WORLD
    assert world is not None
    if _world is None or _world() is not world:
        _close(_made)
        _made, _world = {}, weakref.ref(world)
        weakref.finalize(world, _close, _made)  # of this world alone: it may be freed long after the next one was made
    key = device_type, nodes, devices_per_node, engine
    if key not in _made:
        _made[key] = Meshes(device_type, nodes, devices_per_node, engine=engine)
    return _made[key]


def _close(made: dict[_Key, Meshes]) -> None:
    """Ends the threads of a world, and forgets its groups."""
    for meshes in made.values():
        if "comm_threads" in meshes.__dict__:
            meshes.comm_threads.close()
    made.clear()


class Meshes:
    """Meshes by mode; see [Note: Engines]. Get one with `meshes_of`."""

    def __init__(self, device_type: str, nodes: int, devices_per_node: int, *, engine: Engine) -> None:
        self.device_type, self.nodes, self.devices_per_node = device_type, nodes, devices_per_node
        self._is_async = engine == ASYNC_GLOO

    @functools.cached_property
    def world(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (self.nodes * self.devices_per_node,))

    @functools.cached_property
    def node(self) -> DeviceMesh:
        shape = (self.nodes, self.devices_per_node)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("across", "node"))
        return mesh["node"] if self._is_async else mesh

    @functools.cached_property
    def replicas(self) -> DeviceMesh:
        shape = (self.nodes * self.devices_per_node, 1)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("replicas", "alone"))
        return mesh["alone"] if self._is_async else mesh

    @functools.cached_property
    def groups(self) -> Groups:
        """Process groups which only the communication threads use, or, where there is none, who times collectives."""
        return self._new_groups()

    @functools.cached_property
    def comm_threads(self) -> CommThreads:
        inline = dist.get_backend() == FAKE
        more = 0 if inline else LANES - 1
        return CommThreads([self.groups, *(self._new_groups() for _ in range(more))], inline=inline)

    def _new_groups(self) -> Groups:
        ranks = torch.arange(self.nodes * self.devices_per_node).view(self.nodes, self.devices_per_node)
        timeout = default_timeout()
        backend = dist.Backend.GLOO if self._is_async and dist.get_backend() != FAKE else None
        world = dist.new_group(ranks.flatten().tolist(), timeout=timeout, backend=backend)
        node, across = world, world
        if self.nodes > 1:
            node, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout, backend=backend)
        if self.devices_per_node > 1:
            across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout, backend=backend)
        assert isinstance(world, dist.ProcessGroup) and isinstance(node, dist.ProcessGroup)
        assert isinstance(across, dist.ProcessGroup)
        return Groups(world, node, across)

    @functools.cached_property
    def processors(self) -> dist.ProcessGroup:
        """All ranks, for what is no device's business: asking there would wait for all that it still has to do."""
        group = dist.new_group(backend=dist.Backend.GLOO, timeout=default_timeout())
        assert isinstance(group, dist.ProcessGroup)
        return group

    def of(self, mode: ShardingMode) -> DeviceMesh:
        if not mode.is_sharded:
            return self.replicas
        return self.node if mode.is_reduced_across else self.world

    def after_forward(self, mode: ShardingMode) -> bool | int:
        """FSDP2's `reshard_after_forward`. A replica's compute copy is freed: making it again costs no traffic."""
        if mode.is_sharded_anew:
            return self.devices_per_node
        return not mode.is_kept
