"""`osdp models`: the models known by name."""

from __future__ import annotations

import argparse
import sys

from osdp.cli.output import print_json
from osdp.cli.parser import Commands

DESCRIPTION = """\
List the models that `osdp plan` knows by name, with their exact number of
parameters.

Any other model works too: the path of a Hugging Face config.json, or of its
folder, or package.module:function, where the function returns
(module, example_inputs) or (module, example_inputs, loss)."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("models", help="list the models known by name", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from osdp.report.catalogue import model_rows

    rows = model_rows()
    if arguments.json:
        print_json({"version": 1, "models": [row._asdict() for row in rows]})
        return
    from osdp.report.printing import console
    from osdp.report.terminal import print_models

    print_models(rows, console(sys.stdout))
