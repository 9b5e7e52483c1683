"""Runs a plan's training step with the real FSDP2 in one process: fake tensors, a fake process group, any world size.

What it records is the truth that the planner's timeline is tested against: the bytes alive at every allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp._torch import FakeTensorMode, fake_store, tree_leaves, tree_map_only
from osdp.model.fake import fake_copy
from osdp.model.trace import Hooks, RawTrace, Recorder
from osdp.planfile import Plan
from osdp.runtime.apply import parallelize
from osdp.runtime.local import local_tensor

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group in which this process plays rank 0 and nobody else exists."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    plan: Plan,
    *,
    loss: Callable[[Any], Tensor],
    watched: Callable[[nn.Module], dict[str, nn.Module]],
    optimizer: OptimizerOf,
) -> RawTrace:
    """The second training step of a plan, recorded: by then the optimizer's states exist."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(plan.cluster.world_size):
        with torch.device("meta"):
            model = build()
        with mode:
            model = fake_copy(model, torch.bfloat16 if plan.precision == "pure-bf16" else torch.float32)
        # outside the mode: device meshes hold real tensors
        parallelize(model, plan, carried=plan.cluster.device.is_cpu)
        with mode:
            return _second_step(model, inputs, plan, loss, watched, optimizer)


def _second_step(
    model: nn.Module,
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    plan: Plan,
    loss: Callable[[Any], Tensor],
    watched: Callable[[nn.Module], dict[str, nn.Module]],
    optimizer: OptimizerOf,
) -> RawTrace:
    stepper = optimizer(list(model.parameters()))
    args, kwargs = tree_map_only(Tensor, _fake, inputs(plan.batch_size))
    loss(model(*args, **kwargs)).backward()
    stepper.step()
    stepper.zero_grad()
    return _recorded_step(model, args, kwargs, plan, loss, watched(model), stepper)


def _recorded_step(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    plan: Plan,
    loss: Callable[[Any], Tensor],
    watched: dict[str, nn.Module],
    stepper: torch.optim.Optimizer,
) -> RawTrace:
    recorder = Recorder(set())
    recorder.hold([local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())])
    recorder.hold(
        [local_tensor(t) for state in stepper.state.values() for t in state.values() if isinstance(t, Tensor)]
    )
    recorder.hold([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
    trace = recorder.trace
    with recorder, recorder.following_resizes():
        for _ in range(plan.accumulation):
            hooks = Hooks(recorder, watched)
            recorder.mark("begin", "")
            scalar = loss(model(*args, **kwargs))
            trace.backward_mark = len(trace.marks)
            recorder.mark("turn", "")
            hooks.in_backward = True
            scalar.backward()
            del scalar
            recorder.mark("end", "")
            hooks.remove()
        recorder.mark("optimizer", "")
        stepper.step()
        stepper.zero_grad()
    trace.end_live = recorder.live
    return trace


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
