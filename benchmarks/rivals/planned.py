"""Plans of osdp on its own engine: its choice, the paper's space, and plain ways, to tell engine from plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

import osdp
from osdp.cost.tables import Rules
from osdp.planfile import Plan
from osdp.recompute import Recompute
from osdp.runtime.initialize import initialize
from osdp.training.optimizer import optimizer_of

from .job import FULL, LR, Job, Replica, Trainer, fill, on_meta, whole
from .layouts import Layout, keep_part, pipelined
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
    optimizer = optimizer_of(OPTIMIZER, trained, lr=LR)
    return Replica(model, optimizer, dist.get_rank(), dist.get_world_size(), plan.batch_size)


def planned_stage(job: Job, plans: Sequence[Plan], *, exact: bool = False) -> Trainer:
    """This rank's stage of a pipeline, under its plan over the data-parallel ranks of that stage."""
    layout = Layout(len(plans), job.ranks // len(plans), 1)
    mesh = layout.mesh()
    number = mesh.get_local_rank("pp")
    plan = plans[number]
    names = {name for unit in plan.units for name in unit.modules}
    plain = Job(job.shape, job.hosts, job.ranks_per_host, job.batch)
    model = on_meta(plain)
    keep_part(
        model,
        {int(name.split(".")[1]) for name in names if name.startswith("blocks.")},
        embed=any(name.startswith("embed") for name in names),
        head=any(name.startswith("head") for name in names),
    )
    if exact:
        model.to_empty(device="cpu")
        fill(model)
    osdp.parallelize(model, plan, mesh=mesh["dp"])
    if not exact:
        initialize(model, seed=0)
    optimizer = optimizer_of(OPTIMIZER, [p for p in model.parameters() if p.requires_grad], lr=LR)
    return pipelined([model], [number], layout, job.batch, plan.accumulation, optimizer)


def uniform_rules(mode: str, recompute: str) -> Rules:
    """One mode for all units, blocks gathered whole, as the plain ways are."""
    return Rules(
        modes=(mode,),
        split=False,
        recompute=(Recompute.FULL if recompute == FULL else Recompute.NONE,),
        granularities=("whole",),
        two_levels=False,
    )
