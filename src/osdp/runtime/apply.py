"""Turns a plan into a running model, in place, on FSDP2: the only caller of `fully_shard`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from osdp._torch.clip import clip_over_meshes
from osdp._torch.fsdp import (
    FSDPParamGroup,
    compute_in_place,
    keep_partial,
    param_groups,
    prefetch,
    prefetch_early,
    reduce_after_last_call,
    reduce_alone,
    reduce_in_pipeline,
    shared_post_forward_meshes,
)
from osdp._torch.scaler import agree_on_overflow
from osdp.accelerator import FAKE, running_engine, training_device
from osdp.cost.gather_order import backward_gathers, backward_order, forward_gathers, planned_place
from osdp.cost.sharding import shard_dim
from osdp.cost.training import PRECISIONS
from osdp.engine import ASYNC_GLOO, Engine
from osdp.errors import UsageError
from osdp.losses import chunk_loss
from osdp.model.fake import copy_of, without_cache
from osdp.planfile import Plan, PlanUnit, unit_depths
from osdp.recompute import Recompute
from osdp.runtime.async_comm import Bucket, Reductions
from osdp.runtime.batch_norm import average_once, sync_over
from osdp.runtime.clip import scale_to, torch_norm
from osdp.runtime.collectives import AsyncAllGather, AsyncAllReduce, AsyncReduceScatter, pack
from osdp.runtime.compiled import compile_blocks
from osdp.runtime.consistency import check_model, check_ranks, check_weights, say_other_engine
from osdp.runtime.larger_layout import find_mesh, model_ranks, remember_ranks
from osdp.runtime.local import local_tensor
from osdp.runtime.meshes import Meshes, meshes_of
from osdp.runtime.misuse import BatchWatch, refuse_steps_of, refuse_wrapped
from osdp.runtime.place import Place
from osdp.runtime.recompute import recompute
from osdp.runtime.recovery import Recovery, shards_of
from osdp.runtime.same_inputs import one_tensor_stays_one
from osdp.runtime.scalars import freeze_empty, give_scalars_a_dimension
from osdp.runtime.split import split_operators
from osdp.runtime.unused import Exchange, UnusedGradients, largest_of_all, on_any_rank, on_this_rank
from osdp.sharding import REPLICATE, ShardingMode

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Piece:
    """What one `fully_shard` is applied to: the modules of a unit, or one slice of it."""

    unit: PlanUnit
    mode: ShardingMode
    modules: tuple[nn.Module, ...]
    depth: int


@dataclass(frozen=True)
class Applied:
    """What is known of a model to which a plan was applied."""

    plan: Plan
    pieces: tuple[Piece, ...]
    template: nn.Module | None  # the model as it was, where it was on the meta device
    recovery: Recovery
    ranks: tuple[int, ...]  # all that hold parts or copies of it; see [Note: Larger layout]


_APPLIED = "_osdp_applied"  # on the model itself: pieces lead back to it, so a table of models would keep them all


def applied_to(model: nn.Module) -> Applied:
    """The plan that a model runs, and its pieces."""
    applied = getattr(model, _APPLIED, None)
    if applied is None:
        raise UsageError(f"this {type(model).__name__} runs no plan; call osdp.parallelize(model, plan) first")
    return applied


def template_of(model: nn.Module) -> nn.Module:
    """The model as it was before a plan was applied, on the meta device."""
    applied: Applied | None = getattr(model, _APPLIED, None)
    template = copy_of(model, {}) if applied is None else applied.template
    if template is None:
        raise UsageError("the model had weights when it was parallelized; build it under torch.device('meta') instead")
    return template


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    device: str | torch.device | None = None,
    engine: Engine | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Applies a plan to the model it was made for, in place. Call it on every rank, before the optimizer is made.

    By default it is trained where `osdp.accelerator.training_device` says, by the engine of its process group; see
    [Note: Engines]. For a model that is tensor-parallel, or one stage of a pipeline, `mesh` is the data-parallel
    dimension of the device mesh: `mesh["dp"]`, or `mesh["dp", "ep"]` where experts lie over one of their own; see
    [Note: Larger layout].
    """
    refuse_wrapped(model)
    within = find_mesh(model, plan, mesh)
    mesh = within.ranks
    before = list(model.parameters())
    device = training_device(model, device)
    running = running_engine(device)
    group = None if mesh is None else mesh.get_group()
    check_ranks(plan, group)
    if engine is None:
        say_other_engine(plan, running)
    engine = engine or running
    if plan.loss_chunks > 1:
        chunk_loss(model, plan.loss_chunks)
    give_scalars_a_dimension(model)
    freeze_empty(model)
    check_model(model, plan, group)
    check_weights(model, group, None if within.experts is None else within.experts.get_group())
    nodes, devices = plan.cluster.nodes, plan.cluster.devices_per_node
    meshes = meshes_of(device.type, nodes, devices, engine=engine, within=mesh, experts=within.experts)
    ranks = model_ranks(model, within)
    sync_over(model, group)
    template = copy_of(model, {}) if all(p.is_meta for p in model.parameters()) else None
    modules = dict(model.named_modules())
    is_alone = _is_alone(plan)
    pieces = [_whole(model, plan)] if is_alone else _pieces(model, plan, modules)
    _checkpoint_and_compile(model, plan, modules, device)
    _shard(model, plan, pieces, meshes, engine)
    for piece in pieces:
        for module in piece.modules:
            if isinstance(module, nn.MultiheadAttention):
                one_tensor_stays_one(module)
    reductions = Reductions(meshes.comm_threads) if engine == ASYNC_GLOO else None
    for piece in pieces:
        # A parameter may get a gradient on some ranks only: they all must send it.
        _sharded(piece.modules[0]).set_reduce_scatter_unused_params(True, recurse=False)
        for group in param_groups(piece.modules[0]):
            reduce_after_last_call(group, None if reductions is None else reductions.finish_under_way)
            if not piece.mode.is_sharded:
                compute_in_place(group)
            if is_alone:
                reduce_alone(group)
        if piece.unit.experts and reductions is None:
            _average_over_all(piece, len(ranks), plan.layout.expert)
    if reductions is not None:
        _use_comm_threads(plan, pieces, meshes, reductions)
    place = Place()
    unused = _watch(pieces, meshes, reductions, place)
    if not is_alone:
        _prefetch(plan, pieces, early=engine.gathers_before_waiting)
    on_meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if mesh is not None:
        remember_ranks(on_meshes, len(ranks))
    agree_on_overflow(on_meshes)
    clip_over_meshes(on_meshes, norm=torch_norm, scale=scale_to, shards_of=shards_of)
    once = [piece for piece in pieces if piece.unit.gather_once]
    reduce_in_pipeline(_sharded(model), [_sharded(piece.modules[0]) for piece in once])
    recovery = Recovery(_sharded(model), _groups(pieces), reductions, unused, ranks, _groups(once), place)
    model.register_forward_pre_hook(recovery.before_forward, prepend=True)
    model.register_forward_hook(functools.partial(_free_unless_trained, pieces))
    model.register_forward_pre_hook(BatchWatch(plan).before_forward, with_kwargs=True)
    refuse_steps_of(before, model.parameters())
    setattr(model, _APPLIED, Applied(plan, tuple(pieces), template, recovery, ranks))
    _say_what_to_use(model)
    return model


def _is_alone(plan: Plan) -> bool:
    """Whether a stage of a pipeline has one rank, which gathers and reduces nothing: see `_whole`."""
    special = any(unit.splits > 1 or unit.offload or unit.experts for unit in plan.units)
    casts = PRECISIONS[plan.precision].casts  # a copy of everything at once, where it is one unit
    return plan.layout.pipeline > 1 and plan.cluster.world_size == 1 and not special and not casts


def _whole(model: nn.Module, plan: Plan) -> Piece:
    """All units as one: FSDP2's hooks of a unit take half a millisecond a micro-batch on a CPU, and do nothing here."""
    unit = replace(plan.units[0], name="", modules=("",), gather_once=False, reduced_with=None)
    return Piece(unit, REPLICATE, (model,), 0)


def _checkpoint_and_compile(
    model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module], device: torch.device
) -> None:
    """Before all else, so that hooks of FSDP2 stay outside; see [Note: Compiled blocks] for the order of the two."""
    how = {modules[unit.block]: unit.recompute for unit in plan.units if unit.recompute and unit.block}
    if how:
        without_cache(model)
    is_real = dist.get_backend() != FAKE
    share_draws = device.type == "cpu" and is_real
    compiled = [modules[block] for block in plan.blocks] if plan.compiled and is_real else []
    inside = {block: each for block, each in how.items() if block in compiled and each is Recompute.SELECTIVE}
    for block in how:
        if block not in compiled:
            average_once(block)
    recompute(inside.items(), share_draws=False)
    compile_blocks(compiled, device)
    recompute(((block, each) for block, each in how.items() if block not in inside), share_draws=share_draws)


def _say_what_to_use(model: nn.Module) -> None:
    """What plain models are asked for and a sharded one cannot give, said with its remedy."""

    def no_copy(memo: object) -> NoReturn:
        raise UsageError(
            "a model that runs a plan cannot be copied; for an average of its weights use"
            " osdp.runtime.average.MovingAverage"
        )

    def no_save(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError("a rank has only its shards; call osdp.save_pretrained(model, folder) on every rank instead")

    model.__dict__["__deepcopy__"] = no_copy
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = no_save


def precision_policy(plan: Plan) -> MixedPrecisionPolicy:
    precision = PRECISIONS[plan.precision]
    if precision.casts:
        return MixedPrecisionPolicy(
            param_dtype=_DTYPES[precision.compute_dtype], reduce_dtype=_DTYPES[plan.reduce_dtype]
        )
    return MixedPrecisionPolicy(reduce_dtype=_DTYPES[plan.reduce_dtype])


def _free_unless_trained(pieces: Sequence[Piece], model: nn.Module, inputs: object, outputs: object) -> None:
    """Frees what is kept for a backward that will not come: the optimizer would leave it behind."""
    if not torch.is_grad_enabled():
        for piece in pieces:
            _sharded(piece.modules[0]).reshard()


def _pieces(model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module]) -> list[Piece]:
    """Units in the plan's order, and split ones slice by slice: those in the unit's mode first."""
    slices = split_operators(model, {unit.name: unit.splits for unit in plan.units if unit.splits > 1})
    pieces = []
    depth = unit_depths(plan.units)
    for unit in plan.units:
        if unit.splits == 1:
            pieces.append(Piece(unit, unit.sharding, tuple(modules[name] for name in unit.modules), depth[unit.name]))
        for index, part in enumerate(slices.get(unit.name, ())):
            mode = unit.sharding if index < unit.sharded_splits else REPLICATE
            pieces.append(Piece(unit, mode, (part,), depth[unit.name] + 1))
    # what is sharded over one device is replicated
    alone = {False: plan.cluster.devices_per_node == 1, True: plan.cluster.devices_per_node == plan.layout.expert}
    return [
        replace(piece, mode=REPLICATE) if alone[piece.unit.experts] and piece.mode.is_reduced_across else piece
        for piece in pieces
    ]


def _offload_policy(unit: PlanUnit, engine: Engine, device_type: str) -> OffloadPolicy:
    """Where a unit's shards are. The asynchronous engine runs on CPUs alone, where device and host are the same."""
    if not unit.offload or engine == ASYNC_GLOO:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def _shard(model: nn.Module, plan: Plan, pieces: Sequence[Piece], meshes: Meshes, engine: Engine) -> None:
    policy = precision_policy(plan)
    tied = _tied_names(model)
    sharded: set[nn.Parameter] = set()
    with shared_post_forward_meshes():
        for piece in sorted(pieces, key=lambda piece: -piece.depth):  # deeper units first
            own = meshes.for_units(experts=piece.unit.experts)
            fully_shard(
                piece.modules[0] if len(piece.modules) == 1 else list(piece.modules),
                mesh=own.of(piece.mode),
                reshard_after_forward=own.after_forward(piece.mode, casts=PRECISIONS[plan.precision].casts),
                shard_placement_fn=_placement(piece.mode, own),
                mp_policy=policy,
                offload_policy=_offload_policy(piece.unit, engine, meshes.device_type),
                ignored_params=sharded,
            )
            sharded |= {param.sharded_param for group in param_groups(piece.modules[0]) for param in group.fsdp_params}
            _tie_again(model, tied, sharded)  # else a unit around would take a parameter's other name as its own
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=meshes.world, reshard_after_forward=False, mp_policy=policy, ignored_params=sharded)


def _placement(mode: ShardingMode, meshes: Meshes) -> Callable[[nn.Parameter], Shard] | None:
    """See [Note: Shard dimension] in osdp.cost.sharding."""
    if mode.is_sharded_anew:
        return None
    ranks = meshes.of(mode).size(-1)
    return lambda parameter: Shard(shard_dim(local_tensor(parameter).shape, ranks))


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_again(model: nn.Module, tied: Sequence[Sequence[str]], sharded: Set[nn.Parameter]) -> None:
    """Gives names in modules that are never called the sharded parameter too."""
    for names in tied:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        taken = next((m._parameters[key] for m, key in owners if m._parameters[key] in sharded), None)
        for module, key in owners:
            if taken is not None and module._parameters[key] not in sharded:
                module._parameters[key] = taken


def _divide(gradient: torch.Tensor, by: int) -> None:
    gradient.div_(by)


def _average_over_all(piece: Piece, ranks: int, experts: int) -> None:
    """Divides the sum of an expert's gradients by all ranks, whose samples it has seen; see [Note: Experts].

    NCCL does so as it adds up; gloo cannot, and FSDP2 divides afterwards if it is told to. A replica's FSDP2 would
    divide into a copy: the mean over the ranks with the same experts is divided in place instead.
    """
    module = _sharded(piece.modules[0])
    if not piece.mode.is_sharded:
        module.set_all_reduce_hook(functools.partial(_divide, by=experts))
        return
    module.set_gradient_divide_factor(float(ranks))
    if dist.get_backend() != dist.Backend.NCCL:
        module.set_force_sum_reduction_for_comms(True)


def _use_comm_threads(plan: Plan, pieces: Sequence[Piece], meshes: Meshes, reductions: Reductions) -> None:
    """Gives every piece's collectives to one communication threads; see [Note: Engines]."""
    comm_threads = meshes.comm_threads
    buckets = _buckets(plan, meshes)
    for piece in pieces:
        module, two_levels, experts = _sharded(piece.modules[0]), piece.unit.two_levels, piece.unit.experts
        for group in param_groups(piece.modules[0]):
            scatter = AsyncReduceScatter(reductions, meshes.groups, group, two_levels=two_levels, experts=experts)
            keep_partial(group)
            module.set_custom_all_gather(AsyncAllGather(comm_threads, two_levels=two_levels, experts=experts))
            module.set_custom_reduce_scatter(scatter)
            if not piece.mode.is_sharded:
                bucket = buckets.get(piece.unit.name)
                reduced = AsyncAllReduce(reductions, meshes.groups, group, scatter, bucket, experts=experts)
                module.set_all_reduce_hook(reduced)


def _buckets(plan: Plan, meshes: Meshes) -> dict[str, Bucket]:
    """By unit, the bucket with which it is reduced; see [Note: Joined reductions] in osdp.cost.buckets."""
    packed = functools.partial(pack, ranks=meshes.groups.world.size())
    found: dict[str, Bucket] = {}
    for names in plan.buckets.values():
        found |= dict.fromkeys(names, Bucket(len(names), packed))
    return found


def _watch(pieces: Sequence[Piece], meshes: Meshes, reductions: Reductions | None, place: Place) -> UnusedGradients:
    """See [Note: Unused]; in a world that is not real there is nobody to ask."""
    units = _groups(pieces)
    finish = reductions.finish if reductions is not None else lambda: None
    if dist.get_backend() == FAKE:
        return UnusedGradients(units, finish, on_this_rank, place)
    exchange: Exchange = functools.partial(largest_of_all, group=meshes.cpu_group)
    if reductions is not None:
        run = reductions.run
        exchange = lambda used: run(lambda own: largest_of_all(used, own.world))  # noqa: E731
    return UnusedGradients(units, finish, functools.partial(on_any_rank, exchange=exchange), place)


def _prefetch(plan: Plan, pieces: Sequence[Piece], *, early: bool) -> None:
    """Every piece issues the gathers that osdp.cost.gather_order says; its [Note: Prefetch] says what is `early`."""
    sliced = {_sharded(piece.modules[0]) for piece in pieces if piece.unit.splits > 1}
    by_unit: dict[str, list[FSDPModule]] = {}
    for piece in pieces:
        by_unit.setdefault(piece.unit.name, []).append(_sharded(piece.modules[0]))
    forward = [module for unit in plan.units for module in by_unit[unit.name]]
    backward = [module for unit in backward_order(plan.units) for module in reversed(by_unit[unit.name])]
    for module in forward:
        module._set_unshard_async_op(True)
    place = {_sharded(piece.modules[0]): planned_place(piece.unit) for piece in pieces}
    for current, following in forward_gathers(forward, place.__getitem__).items():
        prefetch(current, following, backward=False)
        if early and current not in sliced:
            prefetch_early(current)
    for current, following in backward_gathers(backward, place.__getitem__).items():
        prefetch(current, following, backward=True)


def _groups(pieces: Sequence[Piece]) -> list[FSDPParamGroup]:
    return [group for piece in pieces for group in param_groups(piece.modules[0])]


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
