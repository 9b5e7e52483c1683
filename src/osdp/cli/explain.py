"""`osdp explain`: why a plan is as it is."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from osdp.cli.output import print_json
from osdp.cli.parser import Commands
from osdp.cli.planned import add_planned, planned_model
from osdp.planfile import Plan

DESCRIPTION = """\
Say why a plan is as it is. With UNIT: what every other mode, split or recompute
of that block or unit would cost in time and memory, with all else as planned.
Without: where the memory limit binds, what computation waits for, and what one
more GiB or Gbit/s would be worth. A GiB is priced by planning again, which
takes a while; --no-prices leaves that out.

The model is traced again: from the name in the plan, or from --model."""

EXAMPLES = """\
examples:
  osdp explain plan.json
  osdp explain plan.json transformer.h.15
  osdp explain plan.json 'lm_head' --no-prices
  osdp explain plan.json --any-batch --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="say why a plan is as it is", description=DESCRIPTION, epilog=EXAMPLES)
    add_planned(parser)
    parser.add_argument(
        "unit", metavar="UNIT", nargs="?", help="a block or unit of the plan, or a pattern such as 'h.1*'"
    )
    parser.add_argument("--no-prices", action="store_true", help="do not price memory and network, as with a UNIT")
    parser.add_argument("--any-batch", action="store_true", help="price memory with the micro-batch free to grow")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    prices = not arguments.no_prices and arguments.unit is None
    if not arguments.quiet:
        print("tracing the model" + (", then planning again" if prices else ""), file=sys.stderr, flush=True)
    _, graph = planned_model(plan, arguments.model)
    from osdp.report.explain_page import print_explanation
    from osdp.report.explanation import explanation
    from osdp.report.printing import console

    found = explanation(plan, graph, unit=arguments.unit, prices=prices, any_batch=arguments.any_batch)
    if arguments.json:
        print_json({"version": 1, **asdict(found)})
    else:
        print_explanation(found, console(sys.stdout))
