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
from osdp._torch.mesh import unflattened
from osdp.accelerator import FAKE
from osdp.engine import ASYNC_GLOO, Engine
from osdp.runtime.async_comm import CommThreads, Groups
from osdp.sharding import ShardingMode

LANES = 2  # see [Note: CommThreads]
_Key = tuple[str, int, int, Engine, tuple[int, ...], tuple[int, ...]]
_made: dict[_Key, Meshes] = {}  # in the world of `_world`
_world: weakref.ref[dist.ProcessGroup] | None = None  # weak: when it is destroyed, what was made in it ends too


def meshes_of(
    device_type: str,
    nodes: int,
    devices_per_node: int,
    *,
    engine: Engine,
    within: DeviceMesh | None = None,
    experts: DeviceMesh | None = None,
) -> Meshes:
    """The meshes of this world, or of a mesh `within` it, the same at every call. Call it on every rank.

    `experts` are the ranks within it that hold the same experts.
    """
    global _made, _world
    world = dist.group.WORLD
    assert world is not None
    if _world is None or _world() is not world:
        _close(_made)
        _made, _world = {}, weakref.ref(world)
        weakref.finalize(world, _close, _made)  # of this world alone: it may be freed long after the next one was made
    ranks, alike = (() if mesh is None else tuple(mesh.mesh.tolist()) for mesh in (within, experts))
    key = device_type, nodes, devices_per_node, engine, ranks, alike
    if key not in _made:
        _made[key] = Meshes(device_type, nodes, devices_per_node, engine=engine, within=within, experts=experts)
    return _made[key]


def _close(made: dict[_Key, Meshes]) -> None:
    """Ends the threads of a world, and forgets its groups."""
    for meshes in made.values():
        if "comm_threads" in meshes.__dict__:
            meshes.comm_threads.close()
    made.clear()


class Meshes:
    """Meshes by mode; see [Note: Engines]. Get one with `meshes_of`.

    `within` is the data-parallel dimension of a larger layout; see [Note: Larger layout]. Other ranks may run plans
    that need other meshes, and groups are made by all ranks together: so all meshes of such a layout are made at once.
    Units of experts have meshes of their own, within the ranks that hold the same `experts`.
    """

    def __init__(
        self,
        device_type: str,
        nodes: int,
        devices_per_node: int,
        *,
        engine: Engine,
        within: DeviceMesh | None = None,
        experts: DeviceMesh | None = None,
        samples: int = 0,
    ) -> None:
        self.device_type, self.nodes, self.devices_per_node = device_type, nodes, devices_per_node
        self._is_async = engine == ASYNC_GLOO
        self._within = within
        self.samples = samples or nodes * devices_per_node  # the ranks whose samples gradients are averaged over
        if within is not None:
            _ = self.replicas, self.node
        self._experts: Meshes | None = None
        if experts is not None:
            each = devices_per_node * experts.size() // self.samples
            self._experts = Meshes(
                device_type, nodes, each, engine=engine, within=experts, samples=nodes * devices_per_node
            )

    def for_units(self, *, experts: bool) -> Meshes:
        """Those of units of experts, or of the others."""
        found = self._experts if experts else self
        assert found is not None
        return found

    @functools.cached_property
    def world(self) -> DeviceMesh:
        return self._within or init_device_mesh(self.device_type, (self.nodes * self.devices_per_node,))

    @functools.cached_property
    def node(self) -> DeviceMesh:
        return self._of_two((self.nodes, self.devices_per_node), ("across", "node"))

    @functools.cached_property
    def replicas(self) -> DeviceMesh:
        return self._of_two((self.nodes * self.devices_per_node, 1), ("replicas", "alone"))

    def _of_two(self, shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
        if self._within is None:
            mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        else:
            mesh = unflattened(self._within, shape, names)
        assert mesh.mesh_dim_names is not None
        return mesh[mesh.mesh_dim_names[1]] if self._is_async else mesh

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
        backend = dist.Backend.GLOO if self._is_async and dist.get_backend() != FAKE else None
        ranks = torch.arange(self.nodes * self.devices_per_node) if self._within is None else self._within.mesh
        ranks = ranks.view(self.nodes, self.devices_per_node)
        world = self._new_group([ranks.flatten().tolist()], backend)
        node = self._new_group(ranks.tolist(), backend) if self.nodes > 1 else world
        across = self._new_group(ranks.T.tolist(), backend) if self.devices_per_node > 1 else world
        experts = None if self._experts is None else self._experts._new_groups()
        return Groups(world, node, across, self.samples, experts)

    def _new_group(self, parts: list[list[int]], backend: str | None) -> dist.ProcessGroup:
        """This rank's group of several, which are all made in the same order by all ranks that are in one of them."""
        if self._within is None:
            group, _ = dist.new_subgroups_by_enumeration(parts, timeout=default_timeout(), backend=backend)
        else:
            own = next(part for part in parts if dist.get_rank() in part)
            local = {"use_local_synchronization": True}  # ranks of other data-parallel groups make their own
            group = dist.new_group(own, timeout=default_timeout(), backend=backend, **local)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @functools.cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """All ranks, for what is no device's business: asking there would wait for all that it still has to do."""
        if self._within is not None:
            return self._new_group([self._within.mesh.tolist()], dist.Backend.GLOO)
        group = dist.new_group(backend=dist.Backend.GLOO, timeout=default_timeout())
        assert isinstance(group, dist.ProcessGroup)
        return group

    def of(self, mode: ShardingMode) -> DeviceMesh:
        if not mode.is_sharded:
            return self.replicas
        return self.node if mode.is_reduced_across else self.world

    def after_forward(self, mode: ShardingMode, *, casts: bool) -> bool | int:
        """FSDP2's `reshard_after_forward`.

        A replica's cast copy is freed: making it again costs no traffic. One that computes in place has none, and
        FSDP2 would but exchange all its parameters in Python.
        """
        if mode.is_sharded_anew:
            return self.devices_per_node
        if not mode.is_sharded:
            return casts
        return not mode.is_kept
