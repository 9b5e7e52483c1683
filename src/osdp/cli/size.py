"""`osdp size`: the smallest or cheapest cluster on which a model trains fast enough."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, add_model, checked, positive, tokens
from osdp.cli.whatif import add_asked, graphs, say
from osdp.cost.training import Training
from osdp.errors import UsageError

if TYPE_CHECKING:
    from osdp.sizing import Case, Target

DESCRIPTION = """\
Find the smallest cluster on which a model trains fast enough: at a throughput,
or through so many tokens in so many days. With prices, the cheapest. Devices
are tried by doubling, and whole nodes in between; every one of them is planned."""

EXAMPLES = """\
prices: a TOML file with dollars an hour of one device,
  [prices]
  "A100-80GB" = 1.79
  "H100-80GB" = 2.99

examples:
  osdp size gpt2-xl --device A100-40GB --target 20000tok/s
  osdp size llama3-8b --device A100-80GB --device H100 --tokens 1e12 --days 30
  osdp size llama3-8b --prices prices.toml --tokens 1e12 --days 30 --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "size", help="find the smallest or cheapest cluster", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_model(parser)
    parser.add_argument("--target", metavar="RATE", type=read_target, help="such as 20000tok/s or 500samples/s")
    parser.add_argument("--tokens", metavar="N", type=amount, help="to train on, such as 1e12; with --days")
    parser.add_argument("--days", metavar="D", type=amount, help="to train them in")
    parser.add_argument(
        "--device",
        metavar="NAME",
        action="append",
        help="may be repeated (default: those of --prices)",
    )
    parser.add_argument("--prices", metavar="FILE", help="a TOML file with dollars an hour of one device; see below")
    parser.add_argument(
        "--node", metavar="N", type=positive, default=8, help="devices in a node (default: %(default)s)"
    )
    parser.add_argument(
        "--most-devices", metavar="N", type=positive, default=4096, help="to try (default: %(default)s)"
    )
    parser.add_argument("--seq-len", metavar="S", type=tokens, help="tokens in a sample (default: the model's own)")
    add_asked(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


@checked
def read_target(text: str) -> Target:
    from osdp.sizing import read_target as read

    return read(text)


@checked
def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number; give one such as 1e12") from None
    if not 0 < value < 1e18:
        raise UsageError(f"{text} is not above 0 and below 1e18; give a number such as 1e12")
    return value


def run(arguments: argparse.Namespace) -> None:
    target = _target(arguments)
    from osdp.cluster import Cluster
    from osdp.sizing import Asked, ranked, read_prices, smallest

    prices = read_prices(arguments.prices) if arguments.prices else {}
    names = arguments.device or list(prices)
    if not names:
        raise UsageError("no device is given; name one of `osdp devices` with --device, or give --prices")
    bases = [Cluster.of(name, devices_per_node=arguments.node) for name in names]
    costs = {Cluster.of(name).device.name: price for name, price in prices.items()}
    training = Training.of(arguments.precision, arguments.optimizer, arguments.reduce_dtype)
    asked = Asked(training, arguments.global_batch, None, arguments.search_seconds)
    (graph,) = graphs(arguments, [arguments.seq_len])
    if target.unit == "tok/s" and graph.seq_len is None:
        raise UsageError(f"samples of {arguments.model} are not tokens; give --target in samples/s")

    def tell(case: Case) -> None:
        say(arguments, f"{case.devices} devices: {target.rate(case):,.0f} {target.unit}")

    found = []
    for base in bases:
        say(arguments, f"trying {base.device.name}")
        price = costs.get(base.device.name)
        limit = arguments.most_devices
        found.append(smallest(graph, base, target, asked, price=price, most_devices=limit, say=tell))
    best = ranked(found)
    if arguments.json:
        clusters = [asdict(each) for each in best]
        print_json({"version": 1, "model": arguments.model, "target": asdict(target), "clusters": clusters})
        return
    from osdp.report.printing import console
    from osdp.report.sizing_page import print_sizes

    title = f"{arguments.model}: the {'cheapest' if prices else 'smallest'} cluster first"
    print_sizes(title, best, target, console(sys.stdout))


def _target(arguments: argparse.Namespace) -> Target:
    from osdp.sizing import DAY_SECONDS, Target

    timed = arguments.tokens is not None or arguments.days is not None
    if (arguments.target is not None) == timed:
        raise UsageError("give either --target, or both --tokens and --days")
    if not timed:
        return arguments.target
    if arguments.tokens is None or arguments.days is None:
        missing = "--tokens" if arguments.tokens is None else "--days"
        raise UsageError(f"{missing} is missing: tokens and days together are a target")
    rate = arguments.tokens / arguments.days / DAY_SECONDS
    return Target(rate, "tok/s", arguments.tokens, arguments.days)
