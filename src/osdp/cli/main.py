"""The parser of all commands, and the exit code of the one that runs; see [Note: Exit codes] in osdp.cli.failed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import osdp
from osdp.cli import (
    completion,
    devices,
    diff,
    doctor,
    explain,
    export,
    graph,
    models,
    plan,
    profile,
    report,
    size,
    trace,
    train,
    tune,
    verify,
    whatif,
)
from osdp.cli.failed import Failed, errors_said
from osdp.cli.parser import Parser

COMMANDS = (
    *(plan, explain, diff, whatif, size, report, trace, export, graph, verify),
    *(doctor, profile, tune, train, models, devices, completion),
)

DESCRIPTION = """\
Train a PyTorch model data-parallel at the highest throughput that its devices'
memory allows.

osdp decides for every operator how it is sharded, whether it is split, whether
its activations are recomputed, and with which batch size to train. Planning
needs no GPU and no weights."""

EXAMPLES = """\
examples:
  osdp models                               which models are known by name
  osdp devices                              which devices are known by name
  osdp plan gpt2-xl --cluster 8xRTX-3090    the best plan, and what it gains
  osdp plan gpt2-xl --cluster 8xRTX-3090 -o plan.json
  osdp explain plan.json                    what binds it, what more is worth
  osdp report plan.json -o report.html      the plan in pictures
  osdp graph plan.json                      what a step computes and sends
  osdp verify plan.json                     the plan against the real runtime
  osdp export plan.json --to fsdp2          the plan as plain FSDP2 code
  torchrun --nproc-per-node 8 -m osdp doctor
  torchrun --nproc-per-node 8 -m osdp profile -o profile.toml
  torchrun --nproc-per-node 8 -m osdp train gpt2-xl --plan plan.json --data FILE

exit codes:
  0 done   1 failed   2 input to correct   3 no plan fits the memory
  130 interrupted"""


def build_parser() -> Parser:
    parser = Parser(prog="osdp", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"osdp {osdp.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; see [Note: Exit codes] in osdp.cli.failed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × shows ?, and the answer still arrives
    # What a model cannot do on fake tensors is told in a sentence; torch would log it before, with its stack.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with errors_said():
            _run(argv)
    except Failed as failed:
        return failed.code
    return 0


def _run(argv: Sequence[str] | None) -> None:
    try:
        parser = build_parser()
        given = sys.argv[1:] if argv is None else argv
        if not given:
            parser.print_help()
            return
        arguments = parser.parse_args(given)
        arguments.run(arguments)
    finally:
        sys.stdout.flush()  # here, where a reader that has left is known; --help leaves through here too
