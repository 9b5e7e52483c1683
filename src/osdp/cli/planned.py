"""What commands that look at a plan again take: its file, and the model that it was made for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from osdp.cost.training import PRECISIONS
from osdp.errors import UsageError
from osdp.plan_check import check_alone, check_graph
from osdp.planfile import Plan

if TYPE_CHECKING:
    from osdp.model.graph import ModelGraph
    from osdp.model.source import ModelSource


def add_planned(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file, as `osdp plan -o` writes it")
    parser.add_argument("--model", metavar="MODEL", help="the model, if the name in the plan does not lead to it")


def planned_model(plan: Plan, model: str | None, *, eager: bool = False) -> tuple[ModelSource, ModelGraph]:
    """The plan's model, traced again: from `model`, or from the name in the plan.

    With `eager` it is traced as if the plan compiled nothing.
    """
    from osdp.model.source import load_model

    check_alone(plan)
    name = plan.model.name if model is None else model
    try:
        source = load_model(name, seq_len=None if ":" in name else plan.model.seq_len)
    except UsageError as error:
        hint = "" if model else f"; the plan was made for {name!r}, give its path with --model"
        raise UsageError(f"{error}{hint}") from None
    if plan.loss_chunks > 1:
        from osdp.losses import chunk_loss

        build = source.build
        source = replace(source, build=lambda: chunk_loss(build(), plan.loss_chunks))
    graph = source.capture(
        PRECISIONS[plan.precision].compute_dtype,
        held_dtype=PRECISIONS[plan.precision].held_dtype,
        device=plan.cluster.device,
        name=plan.model.name,
        compiled=plan.compiled and not eager,
        on_host=plan.has_inputs_on_host,
    )
    if graph.num_parameters != plan.model.parameters:
        raise UsageError(
            f"{name!r} has {graph.num_parameters:,} parameters, the plan is for {plan.model.parameters:,}; "
            "give its model with --model"
        )
    check_graph(plan, graph)
    return source, graph
