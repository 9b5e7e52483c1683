"""Plans of osdp on its own engine: its choice, the paper's space, and plain ways, to tell engine from plan."""

from __future__ import annotations

import torch.distributed as dist

import osdp
from osdp.cost.tables import Rules
from osdp.planfile import Plan
from osdp.recompute import Recompute
from osdp.runtime.initialize import initialize
from osdp.training.optimizer import optimizer_of

from .job import FULL, Job, Replica, whole
from .models import Model, source_of

OPTIMIZER = "adamw-fused"


def planned(job: Job, plan: Plan, *, exact: bool = False) -> Replica:
    """A model under a plan; `exact` gives it the weights that all other ways begin with."""
    model: Model
    if exact:
        model = whole(Job(job.shape, job.hosts, job.ranks_per_host, job.batch))
        osdp.parallelize(model, plan)
    else:
        built = source_of("model", job.shape).build_on_meta()
        assert isinstance(built, Model)
        model = built
        osdp.parallelize(model, plan)
        initialize(model, seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(OPTIMIZER, trained, lr=1e-3)
    return Replica(model, optimizer, dist.get_rank(), dist.get_world_size(), plan.batch_size)


def uniform_rules(mode: str, recompute: str) -> Rules:
    """One mode for all units, blocks gathered whole, as the plain ways are."""
    return Rules(
        modes=(mode,),
        split=False,
        recompute=(Recompute.FULL if recompute == FULL else Recompute.NONE,),
        granularities=("whole",),
        two_levels=False,
    )
