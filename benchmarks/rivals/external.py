"""Libraries beside torch: DeepSpeed's ZeRO and Megatron-FSDP, where they install and run without a GPU."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .job import BETAS, LR, Job, NotHere, Trainer, whole


class _Engine:
    """A DeepSpeed engine."""

    def __init__(self, engine: Any, samples: int) -> None:
        self._engine, self.samples = engine, samples
        self.part, self.parts = dist.get_rank(), dist.get_world_size()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


def deepspeed_zero(stage: int, job: Job) -> Trainer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError:
        raise NotHere("is not installed") from None
    # Its shared memory takes all ranks for one host's, and would pass the bytes around the links between hosts.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = whole(job)
    bucket = max(1 << 16, sum(parameter.numel() for parameter in model.parameters()) // 8)  # it allocates them whole
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 by default, which no other way does
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": 2 * bucket,
            "stage3_max_reuse_distance": 2 * bucket,
        },
        "steps_per_print": 10**9,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, foreach=True)
    deepspeed.logger.setLevel("ERROR")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return _Engine(engine, job.batch)


def megatron_fsdp(job: Job) -> Trainer:
    """Version 0.6.1 asks for `torch.cuda.current_device()` when it wraps a model, whatever device the mesh has."""
    if not torch.cuda.is_available():
        raise NotHere("needs CUDA: it asks for the current GPU when it wraps a model")
    raise NotHere("is not tried with GPUs here")
