"""What can be chosen: units at every granularity, and the options of each.

[Note: Unit]
A unit is what one gather brings in and one reduction sends out: a block, a part of it, an operator, or a slice of an
operator. A unit holds the parameters below its modules that no deeper unit holds, as `fully_shard` groups them.

[Note: Granularity]
A block is gathered whole, by its parts, or by its operators; what is too small to be gathered alone stays with the
block. Outside blocks every operator is a unit. Operators with tied parameters make one unit. Experts over a mesh
dimension of their own are units at every granularity: other ranks hold them than the rest of a block. A block with an
operator that no gradient reaches is gathered whole where that operator would be a unit: backward never enters such a
unit, which therefore would not issue the next one's gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from osdp.cluster import Cluster
from osdp.cost.sharding import shard_dim
from osdp.model.graph import ModelGraph, Operator, Parameter, Stage, is_gathered_alone
from osdp.planfile import OPERATORS, PARTS, WHOLE, Granularity
from osdp.sharding import FREE, KEEP, MODES, REPLICATE, Scope, ShardingMode

SLICES = (2, 4, 8, 16)
LARGE_NUMEL = 1 << 22  # operators from this size on may be split


@dataclass(frozen=True)
class Option:
    """How one unit is held: of `slices` slices, `sharded` in `mode`, the others replicated; see `PlanUnit`.

    Its all-reduce `carries` so many elements of units that are `reduced_with` it; see osdp.cost.buckets.
    """

    mode: ShardingMode
    slices: int = 1
    sharded: int = 1
    reduce_once: bool = False
    two_levels: bool = False
    all_reduce_once: bool = False
    offload: bool = False  # see [Note: Offload] in osdp.cost.offload
    reduced_with: str | None = None
    carries: int = 0
    gather_once: bool = False

    @property
    def held(self) -> list[tuple[ShardingMode, int]]:
        """The modes that slices are held in, each with the number of slices."""
        sharded = self.sharded if self.mode.is_sharded else 0
        kinds = ((self.mode, sharded), (REPLICATE, self.slices - sharded))
        return [(mode, count) for mode, count in kinds if count]

    def defers(self, mode: ShardingMode) -> bool:
        """Whether slices that are held in `mode` are all-reduced across nodes in the last micro-batch only."""
        return self.all_reduce_once and mode.is_reduced_across

    def stays_gathered(self, accumulation: int) -> bool:
        """Whether the gathered copy lives from the first of several micro-batches to the last."""
        return self.gather_once and self.mode.is_kept and accumulation > 1

    def crosses(self, mode: ShardingMode) -> bool:
        """Whether slices that are held in `mode` are exchanged on two levels."""
        return self.two_levels and mode.sharded_over is Scope.WORLD


@dataclass(frozen=True)
class Sizes:
    """Elements of a unit, or of one of its slices, when ranks share it. FSDP2 pads the first dimension.

    `moved` and `moved_gradients` are of what is sharded along another one; see [Note: Shard dimension].
    """

    gathered: int
    held: int
    reduced: int
    trained: int
    gradients: tuple[tuple[str, int], ...]  # elements of each trained parameter, not padded
    shards: tuple[tuple[str, tuple[int, ...]], ...]  # the shape that a rank has of each trained parameter
    tensors: tuple[int, ...]  # gathered elements of each parameter
    moved: int  # gathered elements
    moved_gradients: tuple[tuple[str, int], ...]
    padded: int  # elements, with their padding, of the trained parameters that do not divide over the ranks
    largest: int  # elements of the largest trained parameter, padded

    @property
    def cast_extra(self) -> int:
        """Elements beyond the copy itself while a replica is cast parameter by parameter, the last cast still held."""
        extra, left, before = 0, self.gathered, 0
        for numel in self.tensors:
            extra = max(extra, before + numel - left, numel - (left - numel))
            left -= numel
            before = numel
        return extra

    def clone_extra(self, ranks: int) -> int:
        """Elements beyond the copy itself while it is cloned down to one of `ranks` parts, parameter by parameter."""
        extra = cloned = freed = 0
        for numel in self.tensors:
            cloned += numel // ranks
            extra = max(extra, cloned - freed)
            freed += numel
        return extra


@dataclass(frozen=True)
class Unit:
    """A unit; see [Note: Unit]. `split_dim` is -1 where it cannot be split.

    Above 1, so many ranks share the `experts` of which it has one rank's.
    """

    name: str
    modules: tuple[str, ...]
    block: str | None
    parameters: tuple[Parameter, ...]
    split_dim: int = -1
    experts: int = 1

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained(self) -> bool:
        return any(parameter.trainable for parameter in self.parameters)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for units that cost the same."""
        return tuple((p.shape, p.trainable) for p in self.parameters), self.split_dim, self.experts

    def held_by(self, cluster: Cluster) -> Cluster:
        """The ranks of a plan that share this unit, or have copies of it: all, but of experts."""
        return cluster if self.experts == 1 else with_same_experts(cluster, self.experts)

    def sizes(self, mode: ShardingMode, cluster: Cluster, slices: int = 1) -> Sizes:
        shapes = tuple((p.name, self._sliced(p.shape, slices), p.trainable) for p in self.parameters)
        return _sizes(shapes, mode.ranks(cluster.devices_per_node, cluster.world_size), mode.is_sharded_anew)

    def _sliced(self, shape: tuple[int, ...], slices: int) -> tuple[int, ...]:
        """The shape of the largest slice: all slices are priced like it."""
        if slices == 1:
            return shape
        at = self.split_dim if len(shape) > 1 else 0
        return (*shape[:at], -(-shape[at] // slices), *shape[at + 1 :])

    def can_split(self, slices: int) -> bool:
        if self.split_dim < 0 or self.numel < LARGE_NUMEL:
            return False
        return all(p.shape[self.split_dim if len(p.shape) > 1 else 0] >= slices for p in self.parameters)


@lru_cache(maxsize=65536)
def _sizes(shapes: tuple[tuple[str, tuple[int, ...], bool], ...], ranks: int, first_only: bool) -> Sizes:
    gathered = held = reduced = trained = moved = padded = largest = 0
    gradients, shards, tensors, moved_gradients = [], [], [], []
    for name, shape, trainable in shapes:
        dim = 0 if first_only else shard_dim(shape, ranks)
        numel = math.prod(shape)
        rest = math.prod((*shape[:dim], *shape[dim + 1 :]))
        shard = -(-(shape[dim] if shape else 1) // ranks) * rest
        gathered += shard * ranks
        held += shard
        tensors.append(shard * ranks)
        moved += numel if dim else 0
        if trainable:
            reduced += shard * ranks
            trained += shard
            gradients.append((name, numel))
            shards.append((name, (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :]) if shape else (1,)))
            padded += shard * ranks if shard * ranks != numel else 0
            largest = max(largest, shard * ranks)
            if dim:
                moved_gradients.append((name, numel))
    return Sizes(
        gathered=gathered,
        held=held,
        reduced=reduced,
        trained=trained,
        gradients=tuple(gradients),
        shards=tuple(shards),
        tensors=tuple(tensors),
        moved=moved,
        moved_gradients=tuple(moved_gradients),
        padded=padded,
        largest=largest,
    )


@lru_cache(maxsize=64)
def with_same_experts(cluster: Cluster, experts: int) -> Cluster:
    """The ranks that hold the same experts, where so many ranks of every node share them, and their network."""
    here = cluster.devices_per_node // experts
    share = cluster.network.bytes_per_second * here / cluster.devices_per_node
    network = replace(cluster.network, bytes_per_second=share)
    return replace(cluster, devices_per_node=here, network=network, measured=(), stages=())


def modes_for(cluster: Cluster) -> tuple[ShardingMode, ...]:
    """The modes that differ from each other on a cluster."""
    if cluster.world_size == 1:
        return (REPLICATE,)
    if cluster.nodes == 1 or cluster.devices_per_node == 1:
        return (REPLICATE, KEEP, FREE)
    return MODES


def stage_units(graph: ModelGraph, stage: Stage) -> dict[Granularity, tuple[Unit, ...]]:
    """The units of a stage at each granularity that it has, in the order in which forward enters them."""
    if not stage.is_block:
        return {OPERATORS: _outside_units(graph, stage)}
    operators = [graph.operators[name] for name in stage.operators]
    total = sum(graph.parameters[name].numel for name in {p for op in operators for p in op.parameters})
    tied = {name for op in operators for name in op.parameters if graph.parameters[name].aliases}
    large = [
        op.name
        for op in operators
        if not tied & set(op.parameters) and is_gathered_alone(_numel(graph, op), total) and op.name != stage.name
    ]
    parts = [
        part
        for part in stage.parts
        if not any((name + ".").startswith(part + ".") for name in _tied_owners(operators, tied))
    ]
    experts = [op.name for op in operators if op.experts > 1]
    choices: dict[Granularity, list[str]] = {WHOLE: [], PARTS: parts, OPERATORS: large}
    found: dict[Granularity, tuple[Unit, ...]] = {}
    for granularity, modules in choices.items():
        if stage.finer.get(granularity, stage) is None:
            continue
        units = _block_units(graph, stage, list(dict.fromkeys([*modules, *experts])))
        if granularity == WHOLE or (units not in found.values() and len(units) > 1 and not is_any_unused(graph, units)):
            found[granularity] = units
    return found


def is_any_unused(graph: ModelGraph, units: Iterable[Unit]) -> bool:
    """Whether the loss depends on none of the trained parameters of some unit."""
    trained = ({p.name for p in unit.parameters if p.trainable} for unit in units)
    return any(names and names <= set(graph.unused) for names in trained)


def _tied_owners(operators: Iterable[Operator], tied: set[str]) -> list[str]:
    return [op.name for op in operators if tied & set(op.parameters)]


def _numel(graph: ModelGraph, operator: Operator) -> int:
    return sum(graph.parameters[name].numel for name in operator.parameters)


def _block_units(graph: ModelGraph, stage: Stage, modules: Sequence[str]) -> tuple[Unit, ...]:
    entered = _enter_order(stage)
    owners = sorted([stage.name, *(m for m in modules if m in entered)], key=len, reverse=True)  # deepest first
    held: dict[str, list[Parameter]] = {name: [] for name in owners}
    seen: set[str] = set()
    for operator in stage.operators:
        owner = next(name for name in owners if (operator + ".").startswith(name + "."))
        for parameter in graph.operators[operator].parameters:
            if parameter not in seen:
                seen.add(parameter)
                held[owner].append(graph.parameters[parameter])
    return tuple(
        Unit(name, (name,), stage.name, tuple(held[name]), _split_dim(graph, name, held[name]), _experts(graph, name))
        for name in sorted(held, key=lambda name: entered.get(name, 0))
        if held[name] and name in entered
    )


def _split_dim(graph: ModelGraph, name: str, parameters: Sequence[Parameter]) -> int:
    operator = graph.operators.get(name)
    return operator.split_dim if operator is not None and len(operator.parameters) == len(parameters) else -1


def _experts(graph: ModelGraph, name: str) -> int:
    operator = graph.operators.get(name)
    return 1 if operator is None else operator.experts


def _enter_order(stage: Stage) -> Mapping[str, int]:
    order: dict[str, int] = {}
    for index, segment in enumerate(stage.plain.forward):
        if segment.mark.kind == "enter":
            order.setdefault(segment.mark.name, index)
    return order


def _outside_units(graph: ModelGraph, stage: Stage) -> tuple[Unit, ...]:
    """One unit for each group of tied operators that is first entered in this stage."""
    units: list[Unit] = []
    entered_before: set[str] = set()
    for earlier in graph.stages:
        if earlier is stage:
            break
        entered_before.update(earlier.operators)
    entered = _enter_order(stage)
    done: set[str] = set()
    for name in sorted(stage.operators, key=lambda name: entered[name]):
        group = _tied_group(graph, name)
        if name in done or done & set(group) or entered_before & set(group):
            continue
        done.update(group)
        idle = (p for member in group for p in _never_called(graph, member))
        names = dict.fromkeys([*(p for member in group for p in graph.operators[member].parameters), *idle])
        parameters = tuple(graph.parameters[p] for p in names)
        split_dim = graph.operators[name].split_dim if len(group) == 1 else -1
        units.append(Unit(name, tuple(group), None, parameters, split_dim, _experts(graph, name)))
    return tuple(units)


def _never_called(graph: ModelGraph, name: str) -> list[str]:
    """Parameters of operators below this one that no call reaches: `fully_shard` puts them into its unit."""
    called = {operator for stage in graph.stages for operator in stage.operators}
    used = {parameter for operator in called for parameter in graph.operators[operator].parameters}
    below = (op for op in graph.operators if op not in called and (not name or op.startswith(name + ".")))
    mine = (op for op in below if max((o for o in called if not o or op.startswith(o + ".")), key=len) == name)
    return [p for op in mine for p in graph.operators[op].parameters if p not in used]


def _tied_group(graph: ModelGraph, name: str) -> list[str]:
    """The operators outside blocks that share parameters with this one, itself first."""
    group, names = [name], set(graph.operators[name].parameters)
    outside = [op for stage in graph.stages if not stage.is_block for op in stage.operators]
    found = True
    while found:  # tied to one that is tied to this one counts too
        more = [o for o in dict.fromkeys(outside) if o not in group and names & set(graph.operators[o].parameters)]
        found = bool(more)
        group += more
        names.update(p for other in more for p in graph.operators[other].parameters)
    return group
