"""`osdp verify`: a plan's memory and collectives beside those of the real runtime, in a dry run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from osdp.cli.output import print_json
from osdp.cli.parser import Commands
from osdp.cli.planned import add_planned, planned_model
from osdp.errors import OsdpError
from osdp.planfile import Plan

if TYPE_CHECKING:
    from osdp.verify import Verification

DESCRIPTION = """\
Run a plan's training step with the real FSDP2 in this process, on fake tensors
and a process group of the plan's full size without other processes. Compare the
peak memory, what it consists of, and every collective in its order with what
the plan says. No device is needed.

The model is traced again: from the name in the plan, or from --model."""

EXAMPLES = """\
exit codes:
  0  the peak agrees within 1 %, and the collectives are the planned ones
  1  one of them does not

examples:
  osdp verify plan.json
  osdp verify plan.json --json
  osdp verify plan.json --model ./my-model/config.json"""


class DoesNotAgree(OsdpError):
    """A plan is not what its dry run did."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify", help="compare a plan with the real runtime, in a dry run", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_planned(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.plan)
    found = _verify(plan, arguments.model, quiet=arguments.quiet)
    if arguments.json:
        print_json(found.to_dict())
    else:
        from osdp.report.printing import console
        from osdp.report.verify_page import print_verification

        print_verification(plan, found, console(sys.stdout))
    if not found.ok:
        raise DoesNotAgree("the plan does not agree with its dry run; plan again with --verify")


def _verify(plan: Plan, model: str | None, *, quiet: bool) -> Verification:
    def say(sentence: str) -> None:
        if not quiet:
            print(sentence, file=sys.stderr, flush=True)

    say("tracing the model")
    source, graph = planned_model(plan, model, eager=True)
    from osdp.verify import verify

    say(f"running a step as rank 0 of {plan.cluster.world_size}")
    return verify(plan, graph, build=source.build_on_meta, inputs=source.inputs, loss=source.loss)
