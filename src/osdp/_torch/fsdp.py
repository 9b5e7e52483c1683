"""What we need of FSDP2 beyond its public names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = [
    "AllGather",
    "FSDPModule",
    "FSDPParamGroup",
    "ReduceScatter",
    "WatchedParam",
    "backward_broke",
    "compute_in_place",
    "drop_gradients",
    "param_groups",
    "prefetch",
    "prefetch_early",
    "reduce_after_last_call",
    "shared_post_forward_meshes",
    "watch",
]


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """What FSDP2 gathers together for a module: one group, or none where deeper units hold all of its parameters."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()._fsdp_param_groups


class _Ahead(list[FSDPState]):
    """Units to prefetch, without those that this backward is done with.

    FSDP2 would gather these once more, for nothing, and hold them until backward ends: where the second forward of a
    block ends, the block after it; and where a block hands a tensor through (T5's position bias), whose gradient comes
    last, the operator with which its backward began.
    """

    def __iter__(self) -> Iterator[FSDPState]:
        return (state for state in super().__iter__() if not self._is_done(state))

    @staticmethod
    def _is_done(state: FSDPState) -> bool:
        return any(group._training_state is TrainingState.POST_BACKWARD for group in state._fsdp_param_groups)


def prefetch(module: FSDPModule, following: FSDPModule, *, backward: bool) -> None:
    """Lets a unit gather the one that follows it in forward, or in backward."""
    ahead = _Ahead([following._get_fsdp_state()])
    if backward:
        module._get_fsdp_state()._states_to_backward_prefetch = ahead
    else:
        module._get_fsdp_state()._states_to_forward_prefetch = ahead


def prefetch_early(module: FSDPModule) -> None:
    """Has a unit issue the next one's gather in forward before it waits for its own: they are under way together."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        assert isinstance(group, _PatientGroup)
        group.ahead = module._get_fsdp_state()._states_to_forward_prefetch


def backward_broke(model: FSDPModule) -> bool:
    """Whether the last backward did not come to its end, so that FSDP2's state is not what the next step needs."""
    return model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def drop_gradients(group: FSDPParamGroup) -> None:
    """Forgets gradients that were computed but not reduced; `reset_iter_state` leaves them."""
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def compute_in_place(group: FSDPParamGroup) -> None:
    """Lets a group that is sharded over one rank compute with the parameters it holds, where no cast is needed."""
    for param in group.fsdp_params:
        param.__class__ = _InPlaceParam


class _PatientGroup(FSDPParamGroup):
    """A group that is reduced when backward leaves the last of its calls.

    Autograd completes a gradient once all calls have added to it. FSDP2 alone would reduce zeros after every call but
    the last, and gather again each time.
    """

    _calls = 0  # forward calls of which backward has not yet left
    ahead: Iterable[FSDPState] = ()  # units whose gathers forward issues before it waits for this one's
    _is_early = False  # this one's was itself issued ahead, and forward, not a second one, has entered it

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._is_early = self._all_gather_result is not None and torch._C._current_graph_task_id() == -1
        return super().pre_forward(module, args, kwargs)

    def wait_for_unshard(self) -> None:
        if self._is_early:
            for state in self.ahead:
                for group in state._fsdp_param_groups:
                    FSDPParamGroup._prefetch_unshard(group, "forward")
        self._is_early = False
        super().wait_for_unshard()

    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # a second forward is no further call
            self._calls += 1
        return super()._register_post_backward_hook(args, kwargs)

    def post_backward(self, *unused: Any) -> None:
        if torch._C._current_autograd_node() is not None:
            self._calls -= 1
            if self._calls > 0:
                return
        self._calls = 0  # the last one is left, or backward has ended: of some calls no input needs a gradient
        super().post_backward(*unused)

    def _reset_iter_state(self) -> None:
        self._calls = 0
        super()._reset_iter_state()


def reduce_after_last_call(group: FSDPParamGroup) -> None:
    """Reduces a group that is called several times once, when its gradients are complete."""
    group.__class__ = _PatientGroup


class WatchedParam(FSDPParam):
    """A parameter that tells when it is reduced, and remembers whether this rank had but zeros to give.

    FSDP2 asks for one of three gradients as it begins a reduction: one of this backward, one of several, or zeros.
    """

    is_zero = False  # nothing but zeros in this backward, and no gradient from an earlier one
    reduced: Callable[[], None] | None = None

    @property
    def unsharded_grad_data(self) -> Tensor:
        self._note(zero=False)
        return super().unsharded_grad_data

    @property
    def unsharded_accumulated_grad_data(self) -> Tensor:
        self._note(zero=False)
        return super().unsharded_accumulated_grad_data

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        self._note(zero=self.is_zero or self.sharded_param.grad is None)
        return super().unsharded_zero_grad_data

    def _note(self, *, zero: bool) -> None:
        self.is_zero = zero
        if self.reduced is not None:
            self.reduced()


def watch(group: FSDPParamGroup, reduced: Callable[[], None]) -> list[WatchedParam]:
    """Has every parameter of a group call `reduced` when a reduction of it begins; returns them."""
    found: list[WatchedParam] = []
    for param in group.fsdp_params:
        if not isinstance(param, WatchedParam):
            param.__class__ = WatchedParam
        assert isinstance(param, WatchedParam)
        param.reduced = reduced
        found.append(param)
    return found


class _InPlaceParam(WatchedParam):
    """A parameter whose gathered copy is the parameter itself: stock FSDP2 would make and hold a second one."""

    @property
    def _in_place(self) -> bool:
        data = self._sharded_param_data
        return self.param_dtype is None and data.untyped_storage().nbytes() == data.numel() * data.itemsize

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
    ) -> None:
        if not self._in_place:
            super().init_all_gather_outputs(all_gather_input_numels, all_gather_input_dtypes, world_size, device)
        elif not self._holds(self._sharded_param_data):
            self.all_gather_outputs = [self._sharded_param_data]
            if hasattr(self, "_unsharded_param"):
                del self._unsharded_param  # it names the data that was there before the parameters were replaced

    def _holds(self, data: Tensor) -> bool:
        return bool(self.all_gather_outputs) and self.all_gather_outputs[0] is data

    def free_unsharded_param(self) -> None:
        if not (self._in_place and self._holds(self._sharded_param_data)):
            super().free_unsharded_param()


@contextlib.contextmanager
def shared_post_forward_meshes() -> Iterator[None]:
    """Within it, `fully_shard` builds one mesh for all units that are sharded anew after forward, not one for each."""
    original = _fully_shard._get_post_forward_mesh_info

    made: dict[tuple[int, DeviceMesh], FSDPMeshInfo | None] = {}

    def post_forward(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if isinstance(reshard_after_forward, bool) or reshard_after_forward == mesh_info.shard_mesh_size:
            return original(reshard_after_forward, mesh_info)
        key = reshard_after_forward, mesh_info.mesh
        if key not in made:
            made[key] = original(reshard_after_forward, mesh_info)
        return made[key]

    _fully_shard._get_post_forward_mesh_info = post_forward
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = original
