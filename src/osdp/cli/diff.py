"""`osdp diff`: two plans side by side."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from osdp.cli.output import print_json
from osdp.cli.parser import Commands
from osdp.planfile import Plan

DESCRIPTION = """\
Compare two plan files: what they were asked for, what they predict, and the
units that they shard differently. No model is traced."""

EXAMPLES = """\
examples:
  osdp diff before.json after.json
  osdp diff before.json after.json --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("diff", help="compare two plans", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("before", metavar="A", help="a plan file, as `osdp plan -o` writes it")
    parser.add_argument("after", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    before, after = Plan.load(arguments.before), Plan.load(arguments.after)
    from osdp.report.difference import plan_difference, print_difference
    from osdp.report.printing import console

    found = plan_difference(before, after)
    if arguments.json:
        print_json({"version": 1, **asdict(found), "runs_alike": found.runs_alike})
        return
    stems = Path(arguments.before).stem, Path(arguments.after).stem
    names = stems if stems[0] != stems[1] else ("A", "B")
    print_difference(found, names, console(sys.stdout))
