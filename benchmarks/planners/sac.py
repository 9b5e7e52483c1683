"""torch's own planner of activation checkpointing under FSDP2, `torch.distributed._tools.sac_ilp.sac_milp`.

It is fed as torch's documentation shows: a step on fake tensors under `MemTracker`, `RuntimeEstimator` and
`SACEstimator`. Their roofline needs a GPU to ask for its rates, so here the same roofline takes those of the catalogue's
device. It says for each block which share of its activations to discard; osdp's nearest recompute is taken, every block
sharded and freed. It counts neither optimizer states nor gathered parameters: they are taken off the limit, and the
budget is then corrected by what osdp's timeline finds, as a user would by trial runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from planners.judge import Answer, Case, Space, cpu_seconds, judged, plan_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils._runtime_estimation import _IGNORE_OPS, get_num_bytes
from torch.utils.flop_counter import flop_registry

from osdp.answer import predicted_of
from osdp.cluster.device import Device
from osdp.cost.graph import StepGraph
from osdp.cost.positions import SAVED, TEMPORARIES
from osdp.cost.tables import Rules, Uniform
from osdp.cost.units import WHOLE
from osdp.model.device_kernels import kernels_of
from osdp.model.source import load_model
from osdp.recompute import Recompute
from osdp.search.problem import StageChoice
from osdp.sharding import FREE

RULES = Rules(modes=(FREE,), split=False, granularities=(WHOLE,), two_levels=False, prefetch=(1,))
ROUNDS = 4  # of correcting the budget
GIB = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
