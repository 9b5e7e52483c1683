"""A plan as a few lines of `fully_shard` that a person can read and paste."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from osdp.cost.gather_order import Place, backward_gathers, backward_order, forward_gathers, planned_place
from osdp.planfile import Plan, unit_depths
from osdp.recompute import Recompute
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE, ShardingMode

if TYPE_CHECKING:
    from torch import nn

_HOW = {
    REPLICATE: '"mesh": replicas, "reshard_after_forward": True',
    KEEP: '"mesh": world, "reshard_after_forward": False',
    FREE: '"mesh": world, "reshard_after_forward": True',
    FREE_TO_NODE: '"mesh": world, "reshard_after_forward": {per_node}',
    KEEP_IN_NODE: '"mesh": nodes, "reshard_after_forward": False',
    FREE_IN_NODE: '"mesh": nodes, "reshard_after_forward": True',
}
_MESHES = {
    "world": "init_device_mesh(device_type, ({ranks},))",
    "nodes": 'init_device_mesh(device_type, ({nodes}, {per_node}), mesh_dim_names=("across", "node"))',
    "replicas": 'init_device_mesh(device_type, ({ranks}, 1), mesh_dim_names=("replicas", "alone"))',
}

_BODY = '''
import functools
import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {offload_import}FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

BATCH_SIZE, ACCUMULATION = {batch}, {accumulation}  # micro-batch of a device, micro-batches of a step

# Units in the order of forward, each with the modules that are gathered together, and their mode.
UNITS = [
{units}
]
SHARDED_FIRST = {sharded_first}  # deeper units first; the others in their order
BACKWARD = {backward}
RECOMPUTED = [{recomputed}]
{compiled}{selective}REDUCED_ONCE = {once}  # with accumulation: only in the last micro-batch, see `reduce`
ALL_REDUCED_ONCE = {across}  # with accumulation: across nodes only in the last micro-batch, in the node at each
GATHERED_ONCE = {stay}  # with accumulation: by the first micro-batch, and freed by the last
{ahead}

def parallelize(model: nn.Module, device_type: str = "{device_type}") -> nn.Module:
    """Shards the model in place; make the optimizer after it."""
{meshes}
    how = {{
{how}
    }}
    policy = MixedPrecisionPolicy({policy})
{selective_loop}{compiled_loop}    for name in RECOMPUTED:
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for index in SHARDED_FIRST:
        names, mode = UNITS[index]
        modules = [model.get_submodule(name) for name in names]
        fully_shard(modules if len(modules) > 1 else modules[0], **how[mode], mp_policy=policy)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=world, reshard_after_forward=False, mp_policy=policy)
    # Every unit gathers the next one while it computes, in both directions.
    units = [model.get_submodule(names[0]) for names, _ in UNITS]
    for now, following in itertools.pairwise(units):
        now.set_modules_to_forward_prefetch([following])
    for now, following in itertools.pairwise(units[index] for index in BACKWARD):
        now.set_modules_to_backward_prefetch([following])
{ahead_loops}    return model


def reduce(model: nn.Module, *, last: bool) -> None:
    """Call it before each micro-batch of a step."""
    for index in REDUCED_ONCE:
        model.get_submodule(UNITS[index][0][0]).set_requires_gradient_sync(last, recurse=False)
    for index in ALL_REDUCED_ONCE:
        model.get_submodule(UNITS[index][0][0]).set_requires_all_reduce(last, recurse=False)
    for index in GATHERED_ONCE:
        model.get_submodule(UNITS[index][0][0]).set_reshard_after_backward(last, recurse=False)
'''


def fsdp2_text(plan: Plan, head: str, model: nn.Module) -> str:
    ranks, nodes, per_node = plan.cluster.world_size, plan.cluster.nodes, plan.cluster.devices_per_node
    units = [
        (unit.modules, REPLICATE if per_node == 1 and unit.sharding.is_reduced_across else unit.sharding, unit)
        for unit in plan.units
    ]
    units = [(modules, f"{mode}{_ON_HOST}" if unit.offload else mode, unit) for modules, mode, unit in units]
    modes = list(dict.fromkeys(mode for _, mode, _ in units))
    sizes = {"ranks": ranks, "nodes": nodes, "per_node": per_node}
    how = {mode: _how(mode).format(**sizes) for mode in modes}
    used = {"world", *(_mesh_of(mode) for mode in modes)}
    depth = unit_depths(plan.units)
    order = sorted(range(len(plan.units)), key=lambda index: -depth[plan.units[index].name])
    at = {unit.name: index for index, unit in enumerate(plan.units)}
    blocks = dict.fromkeys(unit.block for unit in plan.units if unit.recompute is Recompute.FULL and unit.block)
    selective = [unit.name for unit in plan.units if unit.recompute is Recompute.SELECTIVE]
    compiled = list(dict.fromkeys(unit.block for unit in plan.units if unit.block)) if plan.compiled else []
    once = [index for index, unit in enumerate(plan.units) if unit.reduce_once]
    across = [
        index
        for index, (_, mode, unit) in enumerate(units)
        if unit.all_reduce_once and ShardingMode(mode.removesuffix(_ON_HOST)).is_reduced_across
    ]
    body = _BODY.format(
        batch=plan.batch_size,
        accumulation=plan.accumulation,
        units="\n".join(_unit_lines([(modules, mode) for modules, mode, _ in units])),
        sharded_first=_numbers(order),
        backward=_numbers([at[unit.name] for unit in backward_order(plan.units)]),
        recomputed=", ".join(_names(list(blocks))),
        compiled=f"COMPILED = [{', '.join(_names(compiled))}]\n" if compiled else "",
        compiled_loop=_COMPILED_LOOP if compiled else "",
        selective=_selective(selective),
        selective_loop=_SELECTIVE_LOOP if selective else "",
        once=_numbers(once),
        across=_numbers(across),
        stay=_numbers([index for index, unit in enumerate(plan.units) if unit.gather_once]),
        ahead=(ahead := _ahead(plan)),
        ahead_loops=_AHEAD_LOOPS if ahead else "",
        device_type="cpu" if plan.cluster.device.name == "CPU" else "cuda",
        meshes="\n".join(f"    {name} = {text.format(**sizes)}" for name, text in _MESHES.items() if name in used),
        how="\n".join(f'        "{mode}": {{{text}}},' for mode, text in how.items()),
        policy=_policy(plan),
        offload_import="CPUOffloadPolicy, " if any(unit.offload for unit in plan.units) else "",
    )
    return head + "\n" + body.lstrip("\n") + (_CLIP if on_several_meshes(plan) else "")


_ON_HOST = " on the host"


def _how(mode: str) -> str:
    """What `fully_shard` is given for a mode, or for units of it that are on the host."""
    stem = mode.removesuffix(_ON_HOST)
    return _HOW[ShardingMode(stem)] + (', "offload_policy": CPUOffloadPolicy()' if stem != mode else "")


_CLIP = '''

def clip_grad_norm_(parameters, max_norm: float, norm_type: float = 2.0, *unused, **more) -> torch.Tensor:
    """In place of torch.nn.utils.clip_grad_norm_, which takes gradients of one mesh and device: here are several."""
    from torch.distributed.tensor import DTensor

    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    places = dict.fromkeys((parameter.grad.device_mesh, parameter.device) for parameter in parameters)
    groups = [[each for each in parameters if (each.grad.device_mesh, each.device) == place] for place in places]
    norms = [torch.nn.utils.get_total_norm([each.grad for each in group], norm_type) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
'''


_AHEAD_LOOPS = """    for index, following in FORWARD_AHEAD.items():
        units[index].set_modules_to_forward_prefetch([units[each] for each in following])
    for index, following in BACKWARD_AHEAD.items():
        units[index].set_modules_to_backward_prefetch([units[each] for each in following])
"""


def _ahead(plan: Plan) -> str:
    """Units that gather others than the next one, or more: those of blocks with a prefetch depth of two."""
    at = {unit.name: index for index, unit in enumerate(plan.units)}
    backward = [at[unit.name] for unit in backward_order(plan.units)]

    def place(index: int) -> Place:
        return planned_place(plan.units[index])

    lines = []
    for name, order, gathers in (
        ("FORWARD_AHEAD", list(range(len(plan.units))), forward_gathers),
        ("BACKWARD_AHEAD", backward, backward_gathers),
    ):
        following = dict(itertools.pairwise(order))
        others = {one: ahead for one, ahead in gathers(order, place).items() if ahead != (following[one],)}
        entries = [f"{one}: {list(ahead)}," for one, ahead in sorted(others.items())]
        rows = (entries[first : first + 6] for first in range(0, len(entries), 6))
        lines += [f"{name} = {{", *("    " + " ".join(row) for row in rows), "}"] if others else []
    if not lines:
        return ""
    return "\n".join(["# Units that gather two units ahead, by their places in UNITS.", *lines]) + "\n"


def on_several_meshes(plan: Plan) -> bool:
    """Whether gradients lie on different meshes or devices, which torch's own clipping does not take."""
    if len({unit.offload for unit in plan.units}) > 1:
        return True
    return len({_mesh_of(unit.mode) for unit in plan.units}) > 1


_COMPILED_LOOP = """    for name in COMPILED:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward)
"""


_SELECTIVE_LOOP = """    for name in SELECTIVE:
        block = model.get_submodule(name)
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, SAVED)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
"""


def _selective(blocks: Sequence[str]) -> str:
    """The blocks that are recomputed but for what these operators put out."""
    if not blocks:
        return ""
    from osdp.model.selective import KEPT  # here, because it imports torch

    saved = "\n".join(f"    torch.ops.{operator}," for operator in sorted(map(str, KEPT)))
    return f"SELECTIVE = [{', '.join(_names(blocks))}]  # but for what these put out\nSAVED = [\n{saved}\n]\n"


def _policy(plan: Plan) -> str:
    names = {"bf16": "param_dtype=torch.bfloat16, ", "fp16": "param_dtype=torch.float16, "}
    param = names.get(plan.precision, "")
    reduce = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[plan.reduce_dtype]
    return f"{param}reduce_dtype={reduce}"


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def template(name: str) -> tuple[str, int] | None:
    """A name with its first number left out, and the number."""
    found = _NUMBER.search(name)
    return None if found is None else (name[: found.start()] + "{i}" + name[found.end() :], int(found[0]))


def _numbers(numbers: Sequence[int]) -> str:
    """A list of numbers as a person would write it: ranges where they are long."""
    parts = []
    for step, run in _runs(numbers):
        by = "" if step == 1 else f", {step}"
        parts.append(f"*range({run[0]}, {run[-1] + step}{by})" if len(run) > 2 else ", ".join(map(str, run)))
    return "[" + ", ".join(parts) + "]"


def _over(numbers: Sequence[int]) -> str:
    """What a loop over numbers goes through: one range without brackets."""
    text = _numbers(numbers)
    return text[2:-1] if text.startswith("[*range(") and text.count("(") == 1 and text.endswith(")]") else text


def _runs(numbers: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
    run: list[int] = []
    step = 0
    for number in numbers:
        if len(run) == 1 and number - run[0] in (1, -1):
            step = number - run[0]
        if run and (step == 0 or number - run[-1] != step):
            yield step, run
            run, step = [], 0
        run.append(number)
    if run:
        yield step, run


def _unit_lines(units: Sequence[tuple[tuple[str, ...], str]]) -> list[str]:
    """A line for each unit; blocks in a row that are held alike share one."""

    def key(item: tuple[tuple[str, ...], str]) -> object:
        modules, mode = item
        found = template(modules[0]) if len(modules) == 1 else None
        return (found[0], mode) if found else (modules, mode)

    lines = []
    for _, group in itertools.groupby(units, key=key):
        found = list(group)
        modules, mode = found[0]
        first = template(modules[0])
        if len(found) > 1 and first is not None:
            numbers = [number for names, _ in found for _, number in [template(names[0]) or ("", 0)]]
            lines.append(f'    *[([f"{first[0]}"], "{mode}") for i in {_over(numbers)}],')
        else:
            lines.append(f'    ([{", ".join(repr(name).replace(chr(39), chr(34)) for name in modules)}], "{mode}"),')
    return lines


def _names(names: Sequence[str]) -> list[str]:
    parts = []
    for _, group in itertools.groupby(names, key=lambda name: (template(name) or (name,))[0]):
        found = list(group)
        first = template(found[0])
        if len(found) > 2 and first is not None:
            numbers = [number for name in found for _, number in [template(name) or ("", 0)]]
            parts.append(f'*[f"{first[0]}" for i in {_over(numbers)}]')
        else:
            parts += [f'"{name}"' for name in found]
    return parts


_LIGHTNING = '''

class ParallelMixin:
    """Put it before LightningModule: `class Mine(ParallelMixin, LightningModule)`, with the network as `self.model`.

    Train it with `Trainer(strategy=ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1))`.
    """

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            parallelize(self.model, self.device_mesh.device_type)
'''

_LIGHTNING_CLIP = """
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm is {gradient_clip_algorithm}; give norm")
        if gradient_clip_val:
            clip_grad_norm_(self.model.parameters(), gradient_clip_val)
"""


def lightning_text(plan: Plan, head: str, model: nn.Module) -> str:
    mixin = _LIGHTNING.format(ranks=plan.cluster.world_size)
    return fsdp2_text(plan, head, model) + mixin + (_LIGHTNING_CLIP if on_several_meshes(plan) else "")


def _mesh_of(mode: str) -> str:
    stem = ShardingMode(mode.removesuffix(_ON_HOST))
    return "replicas" if stem == REPLICATE else "nodes" if stem.is_reduced_across else "world"


_TORCHTITAN = '''

def parallelize_fn(model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """What torchtitan calls: give it to the model's `TrainSpec(parallelize_fn=...)`.

    Set activation_checkpoint.mode = "none" and training.local_batch_size = BATCH_SIZE: both are the plan's.
    """
    if parallel_dims.world_size != {ranks} or parallel_dims.tp > 1 or parallel_dims.pp > 1 or parallel_dims.cp > 1:
        raise ValueError("the plan is for {ranks} ranks of data parallelism and nothing else")
{clip}    return parallelize(model)
'''

_TORCHTITAN_CLIP = """    import torchtitan.distributed.utils

    torchtitan.distributed.utils.clip_grad_norm_ = clip_grad_norm_  # its own takes gradients of one mesh
"""


def torchtitan_text(plan: Plan, head: str, model: nn.Module) -> str:
    clip = _TORCHTITAN_CLIP if on_several_meshes(plan) else ""
    return fsdp2_text(plan, head, model) + _TORCHTITAN.format(ranks=plan.cluster.world_size, clip=clip)
