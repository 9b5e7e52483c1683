"""`osdp trace`: a planned step for the viewers that people have: Perfetto, and memory_viz."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, output_path
from osdp.cli.planned import add_planned, planned_model
from osdp.planfile import Plan

DESCRIPTION = """\
Write the predicted step as two files: a Chrome trace, which ui.perfetto.dev and
chrome://tracing open, with the two streams, their stalls and the memory by
part; and a snapshot of the memory, which pytorch.org/memory_viz opens. `osdp
train --trace DIR` writes the measured trace beside them.

The model is traced again: from the name in the plan, or from --model."""

EXAMPLES = """\
examples:
  osdp trace plan.json
  osdp trace plan.json -o step.json --memory step.pickle
  python -m torch.cuda._memory_viz trace_plot plan.memory.pickle -o memory.html"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace", help="write a planned step for Perfetto and memory_viz", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_planned(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=output_path, help="the Chrome trace (default: PLAN with .trace.json)"
    )
    parser.add_argument(
        "--memory", metavar="FILE", type=output_path, help="the snapshot (default: PLAN with .memory.pickle)"
    )
    parser.add_argument("--json", action="store_true", help="print the Chrome trace and write no file without -o")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    if not arguments.quiet:
        print("tracing the model", file=sys.stderr, flush=True)
    _, model_graph = planned_model(plan, arguments.model)
    from osdp.cost.graph import step_graph_of
    from osdp.report.traces import chrome_trace, write_predicted

    graph = step_graph_of(plan, model_graph)
    if arguments.json:
        print_json(chrome_trace(graph))
        if arguments.output is None and arguments.memory is None:
            return
    base = Path(arguments.plan).with_suffix("")
    trace = arguments.output or output_path(f"{base}.trace.json")
    memory = arguments.memory or output_path(f"{base}.memory.pickle")
    write_predicted(graph, trace, memory)
    if not arguments.json:
        print(f"saved to {trace} (open it at ui.perfetto.dev) and {memory} (open it at pytorch.org/memory_viz)")
