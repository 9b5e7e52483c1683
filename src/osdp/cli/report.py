"""`osdp report`: a plan as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, output_path
from osdp.cli.planned import add_planned, planned_model
from osdp.planfile import Plan

DESCRIPTION = """\
Write a plan as one HTML file: the memory of a step over time, by part, against
the limit; the two streams with their stalls; throughput by batch size; how
every block of the model is sharded; the plan and each baseline (DDP, ZeRO-2,
FSDP, HSDP) side by side; measurements against predictions; and the proof. The
file has all that it needs inside, and opens without a network.

The model is traced again: from the name in the plan, or from --model."""

EXAMPLES = """\
examples:
  osdp report plan.json -o report.html
  osdp verify plan.json --json > verified.json
  osdp report plan.json -o report.html --measured verified.json
  osdp report plan.json --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="write a plan as an HTML page with pictures", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_planned(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=output_path, help="the HTML file (default: the plan's name with .html)"
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        action="append",
        type=Path,
        help="what `osdp train --json` or `osdp verify --json` printed; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print what the page shows as one JSON document instead")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    from osdp.report.measurements import read_measurements

    measurements = read_measurements(arguments.measured or ())
    if not arguments.quiet:
        print("tracing the model", file=sys.stderr, flush=True)
    _, graph = planned_model(plan, arguments.model)
    from osdp.report.report_page import report_page

    page = report_page(plan, graph, measurements)
    if arguments.json:
        print_json({"version": 1, **asdict(page)})
        if arguments.output is None:
            return
    from osdp.files import write_text
    from osdp.report.html import report_html

    path = arguments.output or output_path(str(Path(arguments.plan).with_suffix(".html")))
    write_text(report_html(page), path)
    if not arguments.json:
        print(f"saved to {path}")
