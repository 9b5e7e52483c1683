"""Whether torch still has the private names that this package leans on; asked once, where FSDP2 is first needed."""

from __future__ import annotations

import importlib

import torch

from osdp.errors import OsdpError

TESTED = "torch>=2.13,<2.14"
_FSDP = "torch.distributed.fsdp._fully_shard"
NEEDED: dict[str, tuple[str, ...]] = {
    f"{_FSDP}._fully_shard": ("_get_post_forward_mesh_info",),
    f"{_FSDP}._fsdp_api.AllGather": (),
    f"{_FSDP}._fsdp_api.ReduceScatter": (),
    f"{_FSDP}._fsdp_common.FSDPMeshInfo": (),
    f"{_FSDP}._fsdp_common.TrainingState": ("IDLE", "POST_BACKWARD"),
    f"{_FSDP}._fsdp_param.FSDPParam": (
        *("unsharded_grad_data", "unsharded_accumulated_grad_data", "unsharded_zero_grad_data"),
        *("init_all_gather_outputs", "free_unsharded_param"),
    ),
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": (
        *("lazy_init", "unshard", "reshard", "pre_forward", "pre_backward", "post_backward", "wait_for_unshard"),
        *("_prefetch_unshard", "_register_post_backward_hook", "_reset_iter_state", "_to_unsharded"),
    ),
    f"{_FSDP}._fsdp_state.FSDPState": ("_root_post_backward_final_callback",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_get_default_group"),
    "torch.distributed.device_mesh.DeviceMesh": ("_flatten", "_unflatten"),
    "torch.distributed.tensor.debug": ("_clear_sharding_prop_cache",),
    "torch.optim.AdamW": ("_init_group",),
    "torch.nn.utils.clip_grad._get_total_norm": ("__wrapped__",),  # a wrapper: see osdp._torch.clip
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": ("__wrapped__",),
    "torch.nn.utils.clip_grad.clip_grad_norm_": ("__wrapped__",),
    "torch.nn.utils.clip_grad.clip_grad_value_": ("__wrapped__",),
}
"""Modules and classes, each with the attributes that are used of it."""


def missing_names(needed: dict[str, tuple[str, ...]]) -> list[str]:
    found = []
    for path, attributes in needed.items():
        try:
            owner = importlib.import_module(path)
        except ImportError:
            module, _, name = path.rpartition(".")
            try:
                owner = getattr(importlib.import_module(module), name, None)
            except ImportError:
                owner = None
        names = [path] if owner is None else [f"{path}.{each}" for each in attributes if not hasattr(owner, each)]
        found += names
    return found


def check_torch() -> None:
    missing = missing_names(NEEDED)
    if missing:
        raise OsdpError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which osdp needs to run a plan;"
            f" it was tested with {TESTED}: install such a version"
        )
