"""Runs a plan's training step with the real FSDP2 in one process: fake tensors, a fake process group, any world size.

What it records is the truth that the planner's timeline and graph are compared with: the bytes alive at every
allocation, what they are (see [Note: Whose] in osdp.runtime.memory_attribution), and the collectives as issued.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from osdp._torch import FakeTensorMode, fake_store
from osdp._torch.mesh import forget_meshes
from osdp.cost.positions import CONSTANTS, GRADIENTS, PARAMETERS, STATES
from osdp.cost.schedule import CollectiveRecord
from osdp.engine import ASYNC_GLOO
from osdp.experts import divide_experts
from osdp.model.device_kernels import kernels_of
from osdp.model.fake import compiling_nothing, fake_copy, same_draws, sequences_not_packed, settled
from osdp.model.inputs import map_tensors, tensors_in
from osdp.model.kernels import SCALAR_BYTES
from osdp.model.trace import Hooks, RawTrace
from osdp.model.values import Values, fake_of
from osdp.planfile import Plan
from osdp.runtime.accumulate import accumulate
from osdp.runtime.apply import parallelize
from osdp.runtime.collective_recorder import recording
from osdp.runtime.local import local_tensor
from osdp.runtime.memory_attribution import MemoryAttributionRecorder

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
InputsOf = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
Watched = Callable[[nn.Module], dict[str, nn.Module]]
MOST_MICRO_BATCHES = 3  # the first, the last, and one for all between them, which repeat each other


@dataclass(frozen=True)
class DryRun:
    """One training step: its trace, the collectives issued, and the bytes of every part where most are alive."""

    trace: RawTrace
    issued: tuple[CollectiveRecord, ...]
    peak_parts: dict[str, int]
    micro_batches: int

    @property
    def peak_bytes(self) -> int:
        return max(self.trace.live)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group in which this process plays rank 0 and nobody else exists."""
    forget_meshes()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def dry_run(
    build: Callable[[], nn.Module],
    inputs: InputsOf,
    plan: Plan,
    *,
    loss: Callable[[Any], Tensor],
    watched: Watched,
    optimizer: OptimizerOf,
) -> DryRun:
    """The second training step of a plan, recorded: by then the optimizer's states exist."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(plan.cluster.world_size), _undisturbed():
        with torch.device("meta"):
            model = build()
        with mode:
            model = settled(fake_copy(model, torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32))
        # outside the mode: device meshes hold real tensors
        mesh = _with_experts(model, plan)
        parallelize(model, plan, device="cpu", engine=plan.cluster.engine, mesh=mesh)
        given = inputs(plan.batch_size)
        with same_draws(), mode, Values(plan.batch_size):
            step = _Step(model, given, plan, loss, watched, optimizer)
            with compiling_nothing(), sequences_not_packed(step.kwargs), kernels_of(plan.cluster.device, model):
                return step.second()


def _with_experts(model: nn.Module, plan: Plan) -> DeviceMesh | None:
    """The mesh of a plan whose experts lie over a dimension of their own, and the model divided over it."""
    experts = plan.layout.expert
    if experts == 1:
        return None
    mesh = init_device_mesh("cpu", (plan.cluster.world_size // experts, experts), mesh_dim_names=("dp", "ep"))
    divide_experts(model, mesh["ep"], alone=True)
    return mesh


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without FSDP2's word to who edits outputs in place, and with garbage looked for only among what is new."""
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
            yield
    finally:
        gc.unfreeze()


class _Step:
    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        plan: Plan,
        loss: Callable[[Any], Tensor],
        watched: Watched,
        optimizer: OptimizerOf,
    ) -> None:
        self.model, self.plan, self.loss = model, plan, loss
        self.watched = watched(model)
        self.args, self.kwargs = map_tensors(fake_of, inputs)
        self.optimizer = optimizer(list(model.parameters()))

    def second(self) -> DryRun:
        self.loss(self.model(*self.args, **self.kwargs)).backward()  # one micro-batch suffices for the first
        self.optimizer.step()
        self.optimizer.zero_grad()
        with recording(self.plan.cluster.devices_per_node) as issued:
            recorder = MemoryAttributionRecorder(None if self.plan.cluster.engine == ASYNC_GLOO else issued)
            self._hold(recorder)
            count = min(self.plan.accumulation, MOST_MICRO_BATCHES)
            with recorder, recorder.following_resizes():
                for _ in accumulate(self.model, range(count)):
                    self._micro_batch(recorder)
                recorder.mark("optimizer", "")
                collectives = tuple(issued.issued)  # the optimizer's own are not the plan's
                recorder.name(GRADIENTS, [local_tensor(p.grad) for p in self.model.parameters() if p.grad is not None])
                self.optimizer.step()
                self.optimizer.zero_grad()
        recorder.trace.end_live = recorder.live
        return DryRun(recorder.trace, collectives, recorder.parts_at_peak(), count)

    def _hold(self, recorder: MemoryAttributionRecorder) -> None:
        """What is there before the step."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        inputs = list(tensors_in((self.args, self.kwargs)))
        if self.plan.cluster.device.is_cpu:  # of real kernels, which fake ones do not have
            self.scalars = torch.empty(SCALAR_BYTES, dtype=torch.uint8)
            inputs.append(self.scalars)
        recorder.hold_as(PARAMETERS, [local_tensor(parameter) for parameter in self.model.parameters()])
        recorder.hold_as(STATES, [local_tensor(state) for state in states])
        recorder.hold_as(CONSTANTS, [*(local_tensor(buffer) for buffer in self.model.buffers()), *inputs])

    def _micro_batch(self, recorder: MemoryAttributionRecorder) -> None:
        hooks = Hooks(recorder, self.watched)
        recorder.mark("begin", "")
        scalar = self.loss(self.model(*self.args, **self.kwargs))
        recorder.trace.backward_mark = len(recorder.trace.marks)
        recorder.mark("turn", "")
        hooks.in_backward = True
        scalar.backward()
        del scalar
        recorder.mark("end", "")
        hooks.remove()
