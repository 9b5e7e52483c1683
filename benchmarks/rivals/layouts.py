"""Tensor and pipeline parallelism, alone and together with data parallelism: every layout by one builder."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .data_parallel import shard
from .job import Job, NotHere, Replica, Trainer, adamw, fill, on_meta
from .models import Embed, LoRA, Model, loss_of

OUTPUTS_DIVIDED = ("q", "k", "v", "up", "gate")  # see [Note: Form]
INPUTS_DIVIDED = ("out", "down")
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True)
class Layout:
    """How many ranks each kind of parallelism takes; stages lie across hosts, products within them."""

    pipeline: int
    data: int
    tensor: int
    schedule: str = "1F1B"

    def mesh(self) -> DeviceMesh:
        """Made once: every process group has threads of its own."""
        return _mesh(self.pipeline, self.data, self.tensor)


@functools.cache
def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))


def train(job: Job, layout: Layout) -> Trainer:
    """A model in this layout; its data parallelism is FSDP2's, which keeps or frees, as the switch `data` says.

    DDP cannot: it does not mix with DTensors, and under a pipeline with recompute its buckets count parameters twice.
    """
    if layout.pipeline * layout.data * layout.tensor != job.ranks:
        raise NotHere(f"needs {layout.pipeline * layout.data * layout.tensor} ranks, there are {job.ranks}")
    heads = min(job.shape.widths) // job.shape.head_width
    if heads % layout.tensor:
        raise NotHere(f"{heads} heads do not divide over {layout.tensor} ranks")
    mesh = layout.mesh()
    if layout.pipeline > 1:
        return _pipeline(job, layout, mesh)
    model = on_meta(job)
    _parallelized(model, job, layout, mesh)
    return Replica(model, adamw(model.parameters()), mesh.get_local_rank("dp"), layout.data, job.batch)


def _parallelized(model: Model, job: Job, layout: Layout, mesh: DeviceMesh) -> None:
    """Products over `tp`, then the rest over `dp`, then weights."""
    if layout.tensor > 1:
        tensor_parallel(model, mesh["tp"])
    if layout.data > 1:
        shard(model, mesh["dp"], reshard=job.switches.get("data") == "free")
    model.to_empty(device="cpu")
    fill(model)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        lora = isinstance(module, LoRA)
        if last in OUTPUTS_DIVIDED:
            plan[name] = _LoRAOutputs() if lora else ColwiseParallel()
        elif last in INPUTS_DIVIDED:
            plan[name] = _LoRAInputs() if lora else RowwiseParallel()
        elif last == "predict":
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, Embed) and isinstance(module.tokens, nn.Embedding):
            plan[f"{name}.tokens"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def _placed(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter.data, mesh, [placements[key]], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))


class _LoRAOutputs(ColwiseParallel):
    """The factor that all outputs share stays whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _placed(module, device_mesh, {"weight": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)})


class _LoRAInputs(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _placed(module, device_mesh, {"weight": Shard(1), "lora_a": Shard(1), "lora_b": Replicate()})


@dataclass
class _Pipelined:
    """A rank's stages under a schedule."""

    schedule: Any
    optimizer: torch.optim.Optimizer
    first: bool
    last: bool
    part: int
    parts: int
    samples: int

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        given = (inputs,) if self.first else ()
        self.schedule.step(*given, **({"target": targets, "losses": losses} if self.last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).detach().mean() if losses else None


def _pipeline(job: Job, layout: Layout, mesh: DeviceMesh) -> Trainer:
    each = 2 if layout.schedule == "interleaved" else 1  # stages of a rank
    count = each * layout.pipeline
    if sum(job.shape.layers) < count:
        raise NotHere(f"{sum(job.shape.layers)} blocks are too few for {count} stages")
    micro = job.switches.get("micro_batches", 2) * layout.pipeline
    numbers = range(mesh.get_local_rank("pp"), count, layout.pipeline)
    models = [_stage(job, number, count) for number in numbers]
    for model in models:
        _parallelized(model, job, layout, mesh)
    optimizer = adamw(parameter for model in models for parameter in model.parameters())
    return pipelined(models, numbers, layout, job.batch, micro, optimizer)


def pipelined(
    models: Sequence[Model],
    numbers: Sequence[int],
    layout: Layout,
    batch: int,
    micro_batches: int,
    optimizer: torch.optim.Optimizer,
) -> Trainer:
    """This rank's stages under a schedule of torch's."""
    mesh, own, each = layout.mesh(), numbers[0], len(numbers)
    group, count = mesh["pp"].get_group(), each * layout.pipeline
    stages = [
        PipelineStage(model, number, count, torch.device("cpu"), group=group)
        for model, number in zip(models, numbers, strict=True)
    ]
    kind = SCHEDULES[layout.schedule]
    given = {"n_microbatches": micro_batches, "loss_fn": loss_of}
    schedule = kind(stages if each > 1 else stages[0], **given)  # type: ignore[arg-type]
    ends = own == 0, own == layout.pipeline - 1
    return _Pipelined(schedule, optimizer, *ends, mesh.get_local_rank("dp"), layout.data, batch * micro_batches)


def _stage(job: Job, number: int, count: int) -> Model:
    """The model without the parts of other stages."""
    model = on_meta(job)
    first, stop = _cuts([sum(p.numel() for p in block.parameters()) for block in model.blocks], count)[number]
    keep_part(model, range(first, stop), embed=number == 0, head=number == count - 1)
    return model


def keep_part(model: Model, blocks: Container[int], *, embed: bool, head: bool) -> None:
    """Takes out what other stages have."""
    for index in range(len(model.blocks)):
        if index not in blocks:
            model.blocks._modules[str(index)] = None
    if not embed:
        model.embed = None
    if not head:
        model.head = None
    model.forward = model.outputs  # type: ignore[method-assign]


def _cuts(weights: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Segments of blocks with about equal weight, none empty."""
    ends = list(accumulate(weights))
    cuts = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        nearest = min(range(1, len(ends)), key=lambda cut: abs(ends[cut - 1] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(ends) - (count - number)))
    return list(zip(cuts, [*cuts[1:], len(ends)], strict=True))
