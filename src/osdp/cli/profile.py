"""`osdp profile`: measures the cluster that it runs on, and writes it as a cluster file."""

from __future__ import annotations

import argparse
import os
import sys

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, checked, positive, samples, tokens, toml_path
from osdp.cost.training import PRECISIONS
from osdp.errors import UsageError
from osdp.files import write_text

DESCRIPTION = """\
Measure the cluster on which it runs, on all ranks that torchrun starts, and
write a profile: a cluster file that `osdp plan --cluster` takes. Matrix
products, memory, every collective in every group, what of them overlaps, the
optimizers, and with --model the model's own blocks."""

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m osdp profile -o profile.toml
  torchrun --nproc-per-node 8 -m osdp profile --model llama3-8b -o profile.toml
  osdp plan llama3-8b --cluster profile.toml"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "profile", help="measure the cluster it runs on", description=DESCRIPTION, epilog=EXAMPLES
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=toml_path, default="profile.toml", help="default: %(default)s"
    )
    parser.add_argument("--model", metavar="MODEL", help="time its blocks too; see `osdp plan`")
    parser.add_argument("--seq-len", metavar="S", type=tokens, help="tokens in a sample (default: the model's own)")
    parser.add_argument(
        "--batches",
        metavar="B,B,...",
        type=batches,
        help="samples of a rank (default: 1, 2, 4 and on, until a sample takes no less)",
    )
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="default: bf16, on CPUs fp32")
    parser.add_argument(
        "--seconds", metavar="T", type=positive, default=80, help="to spend, about (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive, default=120, help="for one measurement (default: %(default)s)"
    )
    parser.add_argument("--nodes", metavar="N", type=positive, help="where torchrun does not say it")
    parser.add_argument("--devices-per-node", metavar="N", type=positive, help="where torchrun does not say it")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


@checked
def batches(text: str) -> tuple[int, ...]:
    sizes = tuple(sorted({samples(size) for size in text.split(",")}))
    return sizes


def run(arguments: argparse.Namespace) -> None:
    if arguments.seq_len and arguments.model is None:
        raise UsageError(f"--seq-len {arguments.seq_len} is of a model; give one with --model")
    # A lost rank is told in a sentence; without this, the library tells it first, with its stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    source = None
    if arguments.model is not None:
        from osdp.model.source import load_model

        source = load_model(arguments.model, seq_len=arguments.seq_len)
    from osdp.profiling.run import Wanted, profile

    found, leads = profile(
        Wanted(
            source=source,
            batches=arguments.batches,
            precision=arguments.precision,
            seconds=arguments.seconds,
            timeout_seconds=arguments.timeout,
            nodes=arguments.nodes,
            devices_per_node=arguments.devices_per_node,
            quiet=arguments.quiet,
        )
    )
    if not leads:
        return
    write_text(found.cluster.to_toml(), arguments.output)
    if arguments.json:
        print_json({**found.to_dict(), "output": str(arguments.output)})
        return
    from osdp.report.printing import console
    from osdp.report.profile_page import print_profile, profile_page

    print_profile(profile_page(found), console(sys.stdout))
    print(f"\n{arguments.output} is written: osdp plan {arguments.model or 'MODEL'} --cluster {arguments.output}")
