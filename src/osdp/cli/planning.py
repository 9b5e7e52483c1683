"""What commands that run on ranks take in order to plan: as `osdp plan`, with the ranks that run as the cluster."""

from __future__ import annotations

import argparse

from osdp.cli.parser import checked, memory_size, read_optimizer, samples, tokens
from osdp.cluster import Cluster
from osdp.cost.training import PRECISIONS
from osdp.errors import UsageError


def add_planning(parser: argparse.ArgumentParser, *, global_batch: str) -> argparse._ArgumentGroup:
    """`global_batch` says what a step's samples are if nothing is given."""
    group = parser.add_argument_group("planning, as in `osdp plan`")
    group.add_argument(
        "--cluster", metavar="CLUSTER", type=checked(Cluster.parse), help="plan for it (default: the ranks that run)"
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory_size,
        help="of each rank (default: the device's; half the machine's, shared, on CPUs)",
    )
    group.add_argument("--seq-len", metavar="S", type=tokens, help="tokens in a sample (default: the model's own)")
    group.add_argument("--precision", choices=tuple(PRECISIONS), help="default: bf16, on CPUs fp32")
    group.add_argument("--reduce-dtype", choices=("fp32", "bf16"), help="default: fp32, with pure-bf16 bf16")
    group.add_argument("--optimizer", metavar="NAME", type=read_optimizer, help="default: adamw")
    group.add_argument("--batch", metavar="B", type=samples, help="samples of one rank at a time")
    group.add_argument("--global-batch", metavar="G", type=samples, help=f"samples of a step (default: {global_batch})")
    return group


def check_batch(arguments: argparse.Namespace) -> None:
    if arguments.batch and arguments.global_batch:
        raise UsageError(
            f"--batch {arguments.batch} and --global-batch {arguments.global_batch} exclude each other; give one"
        )
