"""`osdp export`: a plan as code or settings of what people run already."""

from __future__ import annotations

import argparse
from pathlib import Path

from osdp.cli.parser import Commands, output_path
from osdp.cli.planned import add_planned, planned_model
from osdp.files import write_text
from osdp.planfile import Plan

TARGETS = ("fsdp2", "transformers", "accelerate", "lightning", "torchtitan")

DESCRIPTION = """\
Write a plan for what you run already. The text begins with what the target
cannot express and what that costs: the predicted rate of what is left.

  fsdp2         Python with fully_shard calls, to read and to paste
  transformers  a model's _fsdp_plan, and how to load it
  accelerate    a configuration for `accelerate launch --config_file`
  lightning     configure_model for ModelParallelStrategy
  torchtitan    a parallelize_fn"""

EXAMPLES = """\
examples:
  osdp export plan.json --to fsdp2
  osdp export plan.json --to accelerate -o fsdp.yaml
  osdp export plan.json --to torchtitan --model my_package.models:build"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "export", help="write a plan as code of FSDP2 or of a framework", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_planned(parser)
    parser.add_argument("--to", metavar="TARGET", required=True, choices=TARGETS, help=", ".join(TARGETS))
    parser.add_argument("-o", "--output", metavar="FILE", type=output_path, help="write to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    from osdp.export import export, traced_for

    source, graph = planned_model(traced_for(plan, arguments.to), arguments.model)
    made = export(plan, graph, source.build_on_meta(), target=arguments.to)
    if arguments.output is None:
        print(made.text, end="")
        return
    write_text(made.text, Path(arguments.output))
    print("\n".join(made.notes))
    print(f"saved to {arguments.output}")
