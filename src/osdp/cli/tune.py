"""`osdp tune`: runs plans for a few steps, corrects the profile by what they took, and keeps the fastest."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, add_model, output_path, positive, toml_path
from osdp.cli.plan import add_restrictions, asked_recompute, pins_of
from osdp.cli.planning import add_planning, check_batch
from osdp.files import write_text

if TYPE_CHECKING:
    from osdp.tuning.job import Job

DESCRIPTION = """\
Plan a model for the ranks that torchrun starts, run the plan for a few steps,
correct the cluster's figures by what was measured, and plan again, until
nothing changes. Times the model's blocks first if the profile has not."""

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m osdp profile -o profile.toml
  torchrun --nproc-per-node 8 -m osdp tune llama3-8b --cluster profile.toml \\
    -o plan.json --profile tuned.toml
  torchrun --nproc-per-node 8 -m osdp tune llama3-8b --cluster profile.toml \\
    --candidates 4 -o plan.json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="correct a profile by measured steps, keep the fastest plan",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add_model(parser)
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--candidates",
        metavar="K",
        type=positive,
        default=0,
        help="run so many other plans too, to see if one is faster",
    )
    group.add_argument(
        "--steps", metavar="N", type=positive, default=3, help="of a try, of three (default: %(default)s)"
    )
    group.add_argument(
        "--timeout", metavar="SECONDS", type=positive, default=300, help="for one plan's tries (default: %(default)s)"
    )
    add_planning(parser, global_batch="one micro-batch of the best size a rank")
    add_restrictions(parser)
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", type=output_path, help="save the fastest plan to this file")
    output.add_argument("--profile", metavar="FILE", type=toml_path, help="save the corrected cluster file")
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    check_batch(arguments)
    # A lost rank is told in a sentence; without this, the library tells it first, with its stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from osdp.model.source import load_model

    source = load_model(arguments.model, seq_len=arguments.seq_len)
    from osdp.tuning.job import tune

    tuned, leads = tune(_job(arguments), source)
    if not leads:
        return
    if arguments.output is not None:
        tuned.best.plan.save(arguments.output)
    if arguments.profile is not None:
        write_text(tuned.cluster.to_toml(), arguments.profile)
    if arguments.json:
        print_json(tuned.to_dict())
        return
    from osdp.report.printing import console
    from osdp.report.tune_page import print_tuned

    print_tuned(tuned, console(sys.stdout))
    for what, path in (("plan", arguments.output), ("profile", arguments.profile)):
        if path is not None:
            print(f"{what} saved to {path}")


def _job(arguments: argparse.Namespace) -> Job:
    from osdp.tuning.job import Job

    return Job(
        name=arguments.model,
        cluster=arguments.cluster,
        memory_bytes=arguments.memory,
        precision=arguments.precision,
        optimizer=arguments.optimizer or "adamw",
        reduce_dtype=arguments.reduce_dtype,
        batch=arguments.batch,
        global_batch=arguments.global_batch,
        pins=pins_of(arguments.pin or ()),
        modes=arguments.modes,
        split=not arguments.no_split,
        recompute=asked_recompute(arguments),
        candidates=arguments.candidates,
        steps=arguments.steps,
        timeout_seconds=arguments.timeout,
        quiet=arguments.quiet,
    )
