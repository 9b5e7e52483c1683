"""What we need of FSDP2 beyond its public names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from osdp._torch.check import check_torch

check_torch()  # before any of the private names is imported

# ruff: noqa: E402
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from osdp.accelerator import DeviceCalls
from osdp.errors import UsageError

__all__ = [
    "AllGather",
    "FSDPModule",
    "FSDPParamGroup",
    "ReduceAfterLastCall",
    "ReduceScatter",
    "WatchedParam",
    "backward_broke",
    "clear_unreduced",
    "compute_in_place",
    "drop_gradients",
    "forward_broke",
    "gathered_copies",
    "has_unreduced",
    "keep_partial",
    "param_groups",
    "prefetch",
    "prefetch_early",
    "reduce_after_last_call",
    "reduce_alone",
    "reduce_in_pipeline",
    "reduce_unreduced",
    "shared_post_forward_meshes",
    "watch",
    "when_backward_ends",
]


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """What FSDP2 gathers together for a module: one group, or none where deeper units hold all of its parameters."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()._fsdp_param_groups


class PrefetchSkippingDone(list[FSDPState]):
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


def prefetch(module: FSDPModule, following: Sequence[FSDPModule], *, backward: bool) -> None:
    """Lets a unit gather those that follow it in forward, or in backward.

    FSDP2's public `set_modules_to_forward_prefetch` makes a list of its own, which skips nothing.
    """
    ahead = PrefetchSkippingDone([each._get_fsdp_state() for each in following])
    if backward:
        module._get_fsdp_state()._states_to_backward_prefetch = ahead
    else:
        module._get_fsdp_state()._states_to_forward_prefetch = ahead


def prefetch_early(module: FSDPModule) -> None:
    """Has a unit issue the next gathers in forward before it waits for its own: they are under way together."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        assert isinstance(group, ReduceAfterLastCall)
        group.ahead = module._get_fsdp_state()._states_to_forward_prefetch


def on_host(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The sharded parameters that FSDP2 holds on the host."""
    groups = (group for module in modules if isinstance(module, FSDPModule) for group in param_groups(module))
    return {param.sharded_param for group in groups for param in group.fsdp_params if param.offload_to_cpu}


_waiting: list[Callable[[], None]] = []  # for the end of a reduction that no backward makes


def is_in_backward() -> bool:
    """Whether this runs in a backward, as the second forward of a recomputed block does."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Calls it when this backward ends, or the reduction that a pipeline's schedule makes after its last backward."""
    if is_in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    else:
        _waiting.append(callback)


def reduce_in_pipeline(model: FSDPModule, gathered_once: Sequence[FSDPModule]) -> None:
    """Lets a schedule of torch's pipelining reduce a stage: it calls FSDP2's hooks itself, after all micro-batches.

    It also asks that every unit stays gathered after a backward; that is the plan's to say, as it takes memory. So only
    those do that are `gathered_once`.
    """
    state = model._get_fsdp_state()
    stock = state._root_post_backward_final_callback

    def final() -> None:
        stock()
        while _waiting:
            _waiting.pop(0)()

    state._root_post_backward_final_callback = final

    def reshard_after_backward(reshard: bool, *, recurse: bool = True) -> None:
        for each in gathered_once:
            FSDPModule.set_reshard_after_backward(each, reshard, recurse=False)

    model.__dict__["set_reshard_after_backward"] = reshard_after_backward


def backward_broke(model: FSDPModule) -> bool:
    """Whether the last backward did not come to its end, so that FSDP2's state is not what the next step needs."""
    return model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def forward_broke(model: FSDPModule) -> bool:
    """Whether the last forward did not come to its end. Ask before a forward, not within one."""
    return model._get_fsdp_state()._state_ctx.iter_forward_root is not None


def has_unreduced(group: FSDPParamGroup) -> bool:
    """Whether a backward left gradients of this group that are still to be reduced; the same on every rank."""
    return isinstance(group, ReduceAfterLastCall) and group.is_unreduced


def reduce_unreduced(groups: Sequence[FSDPParamGroup]) -> None:
    """Reduces what backwards without a reduction have left, as a backward of its own, at whose end all is done."""

    def reduce(_: Tensor) -> None:
        for group in groups:
            assert isinstance(group, ReduceAfterLastCall)
            group.reduce_now()

    with torch.inference_mode(False):
        anchor = torch.zeros((), requires_grad=True)
        anchor.register_hook(reduce)
        anchor.backward()
    for group in groups:
        group._training_state = TrainingState.IDLE
        group.finalize_backward()
        _free_reduced(group)


def _keep_only_own_bytes(param: FSDPParam) -> None:
    """A gradient can be a view of a larger one, as a class token's is at batch 1: kept, it would hold both."""
    gradient = param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None
    if gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes:
        param._unsharded_param.grad = gradient.clone()


def _free_reduced(group: FSDPParamGroup) -> None:
    """Waits for the reductions that are under way, of whichever group, and frees their inputs."""
    while group.comm_ctx.reduce_scatter_states:  # shared by all groups
        DeviceCalls(group.device).wait_for(group.comm_ctx.reduce_scatter_states.pop().event)


def drop_gradients(group: FSDPParamGroup) -> None:
    """Forgets gradients that were computed but not reduced; `reset_iter_state` leaves them."""
    if isinstance(group, ReduceAfterLastCall):
        group.is_unreduced, group.partial = False, None
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def gathered_copies(groups: Iterable[FSDPParamGroup]) -> dict[nn.Parameter, nn.Parameter]:
    """By gathered copy, the shard that it was made of."""
    params = [param for group in groups for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return {param._unsharded_param: param.sharded_param for param in params}


def clear_unreduced(group: FSDPParamGroup, cleared: Set[nn.Parameter]) -> None:
    """Drops what is not reduced of these parameters. The group is reduced all the same: other ranks may do so."""
    trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    dropped = [param for param in trained if param.sharded_param in cleared]
    if dropped and (group._partial_reduce_output is not None or getattr(group, "partial", None) is not None):
        if len(dropped) < len(trained):
            raise UsageError(
                f"zero_grad() before the last micro-batch clears {len(dropped)} of the {len(trained)} parameters of a"
                " unit whose gradients are added up in one buffer; clear all of them"
            )
        group._partial_reduce_output = None
        if isinstance(group, ReduceAfterLastCall):
            group.partial = None
    for param in dropped:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
        if isinstance(param, WatchedParam):
            param.is_zero = param.was_used = False


def compute_in_place(group: FSDPParamGroup) -> None:
    """Lets a group that is sharded over one rank compute with the parameters it holds, where no cast is needed."""
    for param in group.fsdp_params:
        param.__class__ = _InPlaceParam


def _outside_inference() -> contextlib.AbstractContextManager[Any]:
    """What is gathered in `torch.inference_mode()` is used, and changed in place, by training too."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def _is_differentiated(param: FSDPParam) -> bool:
    """Whether this backward is a torch.autograd.grad of the parameter: then it has no gradient, and never will."""
    own = getattr(param, "_unsharded_param", None)
    if own is None or own.grad is not None or not own.requires_grad:
        return False
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(own).node)
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return True
    return False


class ReduceAfterLastCall(FSDPParamGroup):
    """A group that is reduced when backward leaves the last of its calls, and used in inference mode and training.

    Autograd completes a gradient once all calls have added to it. FSDP2 alone would reduce zeros after every call but
    the last, and gather again each time.
    """

    _calls = 0  # forward calls of which backward has not yet left
    is_unreduced = False  # a backward left gradients here without reducing them
    ahead: Iterable[FSDPState] = ()  # units whose gathers forward issues before it waits for this one's
    finish_reductions: Callable[[], None] | None = None  # ends what is under way beside FSDP2's own
    keeps_partial = False  # FSDP2 knows of this node only, and `partial` is what it keeps where it knows of others
    partial: Tensor | None = None  # reduced in the node, and not yet across nodes
    _is_early = False  # this one's was itself issued ahead, and forward, not a second one, has entered it

    def lazy_init(self) -> None:
        with _outside_inference():
            super().lazy_init()

    def unshard(self, async_op: bool = False) -> None:
        with _outside_inference():
            super().unshard(async_op)

    def reshard(self) -> None:
        with _outside_inference():
            super().reshard()

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True, as a gradient penalty needs it, cannot be had of a model that runs a plan: its"
                " gathered parameters are freed before the second derivative; leave it out"
            )
        super().pre_backward(default_prefetch, *unused)

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
        with _outside_inference():
            if self._all_gather_result is not None and all(map(_is_ready_in_place, self.fsdp_params)):
                self._all_gather_result = None  # stock FSDP2 would copy every parameter to itself
                self._to_unsharded()
            else:
                super().wait_for_unshard()

    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # a second forward is no further call
            self._calls += 1
        return super()._register_post_backward_hook(args, kwargs)

    def post_backward(self, *unused: Any) -> None:
        if any(map(_is_differentiated, self.fsdp_params)):
            raise UsageError(
                "torch.autograd.grad cannot give the gradients of a sharded model's parameters, as ranks must average"
                " them; call backward() and read .grad"
            )
        if torch._C._current_autograd_node() is not None:
            self._calls -= 1
            if self._calls > 0:
                return
        self.reduce_now()  # the last one is left, or backward has ended: of some calls no input needs a gradient

    def reduce_now(self) -> None:
        """Reduces gradients, or keeps them where the group is to be reduced after a later backward.

        The reduction before it ends here in both cases: else its buffers would live until backward comes to a group
        that is reduced, however far that is.
        """
        self._calls = 0
        if not self.reduce_grads:
            if self.finish_reductions is not None:
                self.finish_reductions()
            _free_reduced(self)
            for param in self.fsdp_params:
                _keep_only_own_bytes(param)
        if self.keeps_partial and self.is_reduced_in_part:
            self._reduce_in_part()
        else:
            super().post_backward()
        self.is_unreduced = not (self.reduce_grads and self.all_reduce_grads)

    @property
    def is_reduced_in_part(self) -> bool:
        """Whether a reduction is now one within the node alone."""
        return self.reduce_grads and not self.all_reduce_grads

    def _reduce_in_part(self) -> None:
        """A reduction whose result is no gradient yet, though FSDP2, which knows of no other node, makes it one."""
        earlier = [param.sharded_param.grad for param in self.fsdp_params]
        for param in self.fsdp_params:
            param.sharded_param.grad = None
        super().post_backward()
        for param, gradient in zip(self.fsdp_params, earlier, strict=True):
            param.sharded_param.grad = gradient

    def _reset_iter_state(self) -> None:
        """Ends a pass that failed. What earlier micro-batches gave to a reduction across nodes is not its to drop."""
        self._calls, partial = 0, self._partial_reduce_output
        super()._reset_iter_state()
        self._partial_reduce_output = partial


class _Alone(ReduceAfterLastCall):
    """A group on one rank, which computes in place: its gradients are those of its parameters as they are.

    It stays gathered, which takes no memory, until its gradients are those of a whole step.
    """

    def reduce_now(self) -> None:
        self._calls, self.is_unreduced = 0, not self.reduce_grads
        self._training_state = TrainingState.POST_BACKWARD
        if not self.reduce_grads:
            for param in self.fsdp_params:
                _keep_only_own_bytes(param)
            return
        for param in self.fsdp_params:
            own = getattr(param, "_unsharded_param", None)
            if own is None or own.grad is None:
                continue
            gradient, own.grad = param.unsharded_grad_data, None
            if param.sharded_param.grad is None:
                param.sharded_param.grad = param.to_sharded_dtensor(gradient)
            else:
                param.sharded_param.grad += param.to_sharded_dtensor(gradient)
        if self.reshard_after_backward:
            self.reshard()


def reduce_alone(group: FSDPParamGroup) -> None:
    """Has a group on one rank, of parameters that are not cast, copy no gradients to reduce them with nobody."""
    group.__class__ = _Alone


def reduce_after_last_call(group: FSDPParamGroup, finish_reductions: Callable[[], None] | None) -> None:
    """Reduces a group that is called several times once, when its gradients are complete.

    `finish_reductions` ends what is under way where FSDP2 does not know of it.
    """
    group.__class__ = ReduceAfterLastCall
    assert isinstance(group, ReduceAfterLastCall)
    group.finish_reductions = finish_reductions


def keep_partial(group: FSDPParamGroup) -> None:
    """Has a group whose mesh is one node keep what is reduced there until it is reduced across nodes too."""
    assert isinstance(group, ReduceAfterLastCall)
    group.keeps_partial = True


class WatchedParam(FSDPParam):
    """A parameter that tells when it is reduced, and remembers whether this rank had but zeros to give.

    FSDP2 asks for one of three gradients as it begins a reduction: one of this backward, one of several, or zeros.
    """

    is_zero = False  # nothing but zeros in this backward, and no gradient from an earlier one
    was_used = False  # an earlier backward had more than zeros to give, and that is not a gradient yet
    reduced: Callable[[], None] | None = None
    group: FSDPParamGroup | None = None

    @property
    def is_reduced_in_part(self) -> bool:
        return isinstance(self.group, ReduceAfterLastCall) and self.group.is_reduced_in_part

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
        self._note(zero=(self.is_zero or self.sharded_param.grad is None) and not self.was_used)
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
        param.reduced, param.group = reduced, group
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

    @property
    def is_ready(self) -> bool:
        """Whether what it computes with is there, and made already."""
        own = hasattr(self, "_unsharded_param") and not hasattr(self._sharded_local_tensor, "fsdp_post_all_gather")
        return own and self._in_place and self._holds(self._sharded_param_data)

    def free_unsharded_param(self) -> None:
        if not (self._in_place and self._holds(self._sharded_param_data)):
            super().free_unsharded_param()


def _is_ready_in_place(param: FSDPParam) -> bool:
    return isinstance(param, _InPlaceParam) and param.is_ready


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
