"""`osdp graph`: what a planned step computes and communicates, and in which order."""

from __future__ import annotations

import argparse
import sys

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, output_path
from osdp.cli.planned import add_planned, planned_model
from osdp.files import write_json
from osdp.planfile import Plan

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
    add_planned(parser)
    parser.add_argument("--json", action="store_true", help="print every node as one JSON document")
    parser.add_argument("-o", "--output", metavar="FILE", type=output_path, help="save every node to this JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    _, model_graph = planned_model(plan, arguments.model)
    from osdp.cost.graph import step_graph_of

    graph = step_graph_of(plan, model_graph)
    if arguments.output is not None:
        write_json(graph.to_dict(), arguments.output)
    if arguments.json:
        print_json(graph.to_dict())
        return
    from osdp.report.graph_page import graph_page
    from osdp.report.printing import console
    from osdp.report.terminal import print_graph

    print_graph(graph_page(graph.nodes), console(sys.stdout))
    if arguments.output is not None:
        print(f"saved to {arguments.output}")
