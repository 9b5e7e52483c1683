"""`osdp doctor`: checks machines before anything is trained on them, and writes a report that can be sent."""

from __future__ import annotations

import argparse
import os
import sys

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, output_path, positive
from osdp.errors import OsdpError
from osdp.files import write_json

DESCRIPTION = """\
Check the machines it runs on, alone or on all ranks that torchrun starts, in
about a minute: devices, backends, versions; every collective; a small model
trained in every mode and compared with a single process; a step's memory,
planned and measured. Ends with 1 and a sentence if a check fails."""

EXAMPLES = """\
examples:
  osdp doctor
  torchrun --nproc-per-node 8 -m osdp doctor -o report.json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="check these machines, and write a report", description=DESCRIPTION, epilog=EXAMPLES
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=output_path, default="osdp-report.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive, default=120, help="for one check (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is told in a sentence, not with a stack
    from osdp.doctor.run import Wanted, examine

    report, leads = examine(Wanted(timeout_seconds=arguments.timeout, quiet=arguments.quiet))
    if leads:
        write_json(report.to_dict(), arguments.output)
        if arguments.json:
            print_json(report.to_dict())
        else:
            from osdp.report.doctor_page import print_report
            from osdp.report.printing import console

            print_report(report, console(sys.stdout))
            print(f"\n{arguments.output} is written; it has host names and settings of libraries, no data of yours")
    if not report.failed:
        return
    if not leads:
        raise SystemExit(1)
    first = report.failed[0]
    raise OsdpError(
        f"{len(report.failed)} of {len(report.checks)} checks failed; {first.name} is off by {first.error:.2g}, "
        f"{first.limit:g} is allowed ({first.detail}); {first.remedy}"
    )
