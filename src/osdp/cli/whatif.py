"""`osdp whatif`: the best plan for other memory, other numbers of devices and other lengths of samples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from osdp.cli.output import print_json
from osdp.cli.parser import (
    Commands,
    add_model,
    checked,
    memory_size,
    output_path,
    positive,
    read_optimizer,
    samples,
    whole,
)
from osdp.cli.plan import add_rates, with_rates
from osdp.cluster import Cluster
from osdp.cost.training import PRECISIONS, Training
from osdp.errors import UsageError
from osdp.planfile import MOST_TOKENS

if TYPE_CHECKING:
    from osdp.model.graph import ModelGraph
    from osdp.sizing import Case

T = TypeVar("T")

DESCRIPTION = """\
Plan a model for every combination of memory, number of devices and length of
samples, and compare: which fits, how fast it is, and what a plan gains over the
best baseline. The model is traced once for each length."""

EXAMPLES = """\
examples:
  osdp whatif gpt2-xl --cluster 8xA100-40GB --memory 16,24,40,80GiB
  osdp whatif llama3-8b --cluster 8xH100 --devices 8,16,64 -o scaling.svg
  osdp whatif bert-large --cluster 8xL4 --seq-len 512,1024,2048 --json"""

MOST_CASES = 100


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "whatif", help="plan for other memory, devices and lengths", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_model(parser)
    parser.add_argument(
        "--cluster", metavar="CLUSTER", required=True, type=checked(Cluster.parse), help="as in `osdp plan`"
    )
    parser.add_argument(
        "--memory", metavar="A,B", type=read_memories, default=[], help="of each device, such as 16,24,40,80GiB"
    )
    parser.add_argument(
        "--devices", metavar="A,B", type=listed(positive), default=[], help="numbers of them, in nodes like CLUSTER's"
    )
    parser.add_argument(
        "--seq-len", metavar="A,B", type=listed(whole(1, MOST_TOKENS)), default=[None], help="tokens in a sample"
    )
    add_rates(parser)
    add_asked(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("-o", "--output", metavar="FILE", type=chart_path, help="draw a chart: .svg or .html")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def add_asked(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training, as in `osdp plan`")
    group.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16", help="default: %(default)s")
    group.add_argument("--optimizer", metavar="NAME", type=read_optimizer, default="adamw", help="default: %(default)s")
    group.add_argument("--reduce-dtype", choices=("fp32", "bf16"), help="gradients on the wire")
    group.add_argument("--global-batch", metavar="G", type=samples, help="samples of a whole step")
    group.add_argument(
        "--search-seconds", metavar="S", type=positive, default=5, help="for each plan at most (default: %(default)s)"
    )


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Comma-separated values, each read by `read`, without repetition."""

    def read_all(text: str) -> list[T]:
        return list(dict.fromkeys(read(each.strip()) for each in text.split(",")))

    return read_all


@checked
def read_memories(text: str) -> list[int]:
    from osdp.sizing import read_memories as read

    if text.strip()[-1:].isdigit():
        memory_size(text.split(",")[-1])  # says that a unit is missing
    return list(dict.fromkeys(read(text)))


@checked
def chart_path(text: str) -> Path:
    path = output_path(text)
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"{text!r} ends in neither .svg nor .html; a chart is one of the two")
    return path


def run(arguments: argparse.Namespace) -> None:
    count = len(arguments.memory or [0]) * len(arguments.devices or [0]) * len(arguments.seq_len)
    if count > MOST_CASES:
        raise UsageError(f"these are {count} combinations, and at most {MOST_CASES} are planned; give fewer values")
    from osdp.sizing import Asked, cases, with_devices

    arguments.cluster = with_rates(arguments)
    for devices in arguments.devices:
        with_devices(arguments.cluster, devices)  # refuses what does not divide before anything is traced
    training = Training.of(arguments.precision, arguments.optimizer, arguments.reduce_dtype)
    asked = Asked(training, arguments.global_batch, None, arguments.search_seconds)
    found = []
    sizes = {"memories": arguments.memory, "devices": arguments.devices}
    for case in cases(graphs(arguments, arguments.seq_len), arguments.cluster, **sizes, asked=asked):
        found.append(case)
        say(arguments, f"{len(found)} of {count} planned")
    title = f"{arguments.model} on {arguments.cluster.device.name}"
    from osdp.report.sizing_page import chart_html, chart_of, chart_svg, print_cases

    if arguments.output is not None:
        from osdp.files import write_text

        draw = chart_svg if arguments.output.suffix == ".svg" else chart_html
        write_text(draw(chart_of(title, found)), arguments.output)
    if arguments.json:
        print_json({"version": 1, "model": arguments.model, "cases": [_document(case) for case in found]})
        return
    from osdp.report.printing import console

    print_cases(title, found, console(sys.stdout))
    if arguments.output is not None:
        print(f"saved to {arguments.output}")


def _document(case: Case) -> dict[str, Any]:
    return {**asdict(case), "tokens_per_second": case.tokens_per_second, "fits": case.fits}


def graphs(arguments: argparse.Namespace, lengths: Sequence[int | None]) -> Iterator[ModelGraph]:
    """The model, traced at each length of samples."""
    from osdp.model.source import load_model

    for length in lengths:
        say(arguments, "tracing the model" + (f" at {length} tokens" if length else ""))
        source = load_model(arguments.model, seq_len=length)
        precision = PRECISIONS[arguments.precision]
        yield source.capture(precision.compute_dtype, held_dtype=precision.held_dtype, name=arguments.model)


def say(arguments: argparse.Namespace, sentence: str) -> None:
    if not arguments.quiet:
        print(sentence, file=sys.stderr, flush=True)
