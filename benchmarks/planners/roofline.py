"""The roofline of torch's `RuntimeEstimator` with a catalogue device's rates: the longer of products and traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils._runtime_estimation import _FLOAT_TYPES, _IGNORE_OPS, get_num_bytes
from torch.utils.flop_counter import flop_registry

from osdp.cluster.device import Device

NAMES = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def roofline(device: Device) -> Callable[..., tuple[Any, float]]:
    """What `RuntimeEstimator` calls for every operator: its result, and its milliseconds."""

    def estimate(func: Any, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Any, float]:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _IGNORE_OPS:
            return out, 0.0
        outputs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        seconds = device.memory_seconds(sum(get_num_bytes(each) for each in (*inputs, *outputs)))
        dtypes = {each.dtype for each in outputs if each.dtype in _FLOAT_TYPES}
        if packet in flop_registry and dtypes:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            seconds = max(seconds, device.matmul_seconds(flops, NAMES[dtypes.pop()]))
        return out, 1000 * seconds

    return estimate
