"""Runs a command on a cluster on one machine, as torchrun would on each host, or measures what its links carry.

Exit codes: that of the rank that failed first (128 + the signal that ended it), 2 where the machine cannot hold a
cluster, 124 after the time limit, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType

from .check import measured_rates, table
from .network import ClusterUnavailable, bits_per_second
from .ranks import ClusterTimeout, RankResult, Start, first_failure
from .simulated import SimulatedCluster

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAIL_LINES = 20
UNAVAILABLE, TIMED_OUT = 2, 124


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m benchmarks.cluster", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="hosts (%(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks of each host (%(default)s)")
    parser.add_argument("--across", default="500mbit", help="rate of each host's link, both ways (%(default)s)")
    parser.add_argument("--node", help="rate of each host's loopback, which its ranks share (unlimited)")
    parser.add_argument("--devices", action="store_true", help="each rank computes on a share of the CPUs of its own")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the command (%(default)s)")
    parser.add_argument("--all-output", action="store_true", help="show every rank's output, not only rank 0's")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--check", action="store_true", help="measure the links instead of running a command")
    parser.add_argument("command", nargs="*", help="after --, what each rank runs")
    return parser


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        for rate in (options.across, options.node):
            if rate is not None:
                bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    if min(options.hosts, options.ranks_per_host) < 1:
        parser.error(f"{options.hosts} hosts of {options.ranks_per_host} ranks; at least 1 of each is needed")
    if options.check == bool(options.command):
        parser.error("give either --check or a command after --, as in: -- python script.py")
    return options


def show(start: Start, stream: str, line: str) -> None:
    print(f"[{start.host}/{start.rank}] {line}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def exit_code(failed: RankResult | None) -> int:
    if failed is None:
        return 0
    return failed.exit_code if failed.exit_code > 0 else 128 - failed.exit_code


def run_command(cluster: SimulatedCluster, options: Namespace) -> int:
    def on_line(start: Start, stream: str, line: str) -> None:
        if not options.json and (start.rank == 0 or options.all_output):
            show(start, stream, line)

    try:
        results = cluster.run(options.command, timeout=options.timeout, on_line=on_line)
    except ClusterTimeout as error:
        print(f"error: {error}", file=sys.stderr)
        results, code = error.results, TIMED_OUT
    else:
        failed = first_failure(results)
        code = exit_code(failed)
        if failed is not None:
            print(f"error: rank {failed.rank} ended with {failed.exit_code}; its last lines:", file=sys.stderr)
            print("\n".join(failed.stderr.splitlines()[-TAIL_LINES:]), file=sys.stderr)
    if options.json:
        print(json.dumps({"exit_code": code, "ranks": [asdict(result) for result in results]}, indent=2))
    return code


def run_check(cluster: SimulatedCluster, options: Namespace) -> int:
    rates = measured_rates(cluster)
    print(json.dumps([asdict(rate) for rate in rates], indent=2) if options.json else table(rates))
    return 0


def stop(number: int, _: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleaning up
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for each in SIGNALS:
        signal.signal(each, stop)
    try:
        with SimulatedCluster(
            hosts=options.hosts,
            ranks_per_host=options.ranks_per_host,
            across=options.across,
            node=options.node,
            devices=options.devices,
        ) as cluster:
            return run_check(cluster, options) if options.check else run_command(cluster, options)
    except ClusterUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
