"""`osdp graph`: what a planned step computes and communicates, and in which order."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from osdp.cli.output import print_json, write_json
from osdp.cli.parser import Commands, output_path
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.planfile import Plan

if TYPE_CHECKING:
    from osdp.model.graph import ModelGraph

DESCRIPTION = """\
Show the distributed computation graph of a planned step: its compute and its
collectives, with their bytes, groups and times, equal stages together. JSON has
every node with its dependencies.

The model is traced again: from the name in the plan, or from --model."""

EXAMPLES = """\
groups:
  world   every rank
  node    the ranks of one node
  across  one rank of every node

examples:
  osdp graph plan.json
  osdp graph plan.json -o graph.json
  osdp graph plan.json --model ./my-model/config.json --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "graph", help="show what a planned step computes and communicates", description=DESCRIPTION, epilog=EXAMPLES
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan file, as `osdp plan -o` writes it")
    parser.add_argument("--model", metavar="MODEL", help="the model, if the name in the plan does not lead to it")
    parser.add_argument("--json", action="store_true", help="print every node as one JSON document")
    parser.add_argument("-o", "--output", metavar="FILE", type=output_path, help="save every node to this JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    model_graph = _capture(plan, arguments.model)
    from osdp.cost.graph import step_graph_of

    graph = step_graph_of(plan, model_graph)
    if arguments.output is not None:
        write_json(graph.to_dict(), arguments.output)
    if arguments.json:
        print_json(graph.to_dict())
        return
    from osdp.report.graph_page import graph_page
    from osdp.report.terminal import console, print_graph

    print_graph(graph_page(graph.nodes), console(sys.stdout))
    if arguments.output is not None:
        print(f"saved to {arguments.output}")


def _capture(plan: Plan, model: str | None) -> ModelGraph:
    from osdp.model.source import load_model

    training = Training.of(plan.precision, plan.optimizer, plan.reduce_dtype)
    name = model or plan.model.name
    try:
        source = load_model(name, seq_len=None if ":" in name else plan.model.seq_len)
    except UsageError as error:
        hint = "" if model else f"; the plan was made for {name!r}, give its path with --model"
        raise UsageError(f"{error}{hint}") from None
    from osdp.model.capture import capture

    graph = capture(
        source.build_on_meta(),
        source.inputs,
        loss=source.loss,
        name=plan.model.name,
        compute_dtype=training.precision.compute_dtype,
        seq_len=plan.model.seq_len,
    )
    count = sum(parameter.numel for parameter in graph.parameters.values())
    if count != plan.model.parameters:
        raise UsageError(
            f"{name!r} has {count:,} parameters, the plan is for {plan.model.parameters:,}; give its model with --model"
        )
    return graph
