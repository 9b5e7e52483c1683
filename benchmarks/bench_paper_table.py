"""The paper's table at its own settings, and larger models on 8 to 1,024 H100: predictions of the calibrated catalogue.

    python benchmarks/bench_paper_table.py                     # the paper's settings
    python benchmarks/bench_paper_table.py --scale             # llama3-8b, llama3-70b, mixtral-8x7b on 8 to 1,024 H100
    python benchmarks/bench_paper_table.py --layouts           # tensor and pipeline parallelism at the paper's settings
    python benchmarks/bench_paper_table.py --page docs/benchmarks/paper-table.md    # of what is known, with its plots

Nothing here was run on an accelerator: every figure is the cost model's, osdp's and the baselines' alike. The paper's
settings are GPTs that are narrow and deep, wide and shallow, and inconsistent and consecutive, in fp32, on 8 RTX TITAN
with 8 and 16 GiB and on 2 hosts of 8 A100. What is known is kept in benchmarks/results/paper-table.jsonl, one line for
each figure; what is there is not computed again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from captured import captured
from common import deliver, parser
from paper_page import Figure, Setting, draw, page, rows

from osdp.api import resolve
from osdp.batching import Batching
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.sharding import FREE, REPLICATE

RESULTS = Path(__file__).parent / "results" / "paper-table.jsonl"
PAPERS_MODELS = ("gpt-48x1536", "gpt-96x1024", "gpt-48x2048", "gpt-4x8192", "gpt-2x12288", "gpt-pyramid")
PAPERS_CLUSTERS = (("8xRTX-TITAN", "8GiB"), ("8xRTX-TITAN", "16GiB"), ("2x8xA100-40GB", "16GiB"))
PUBLISHED = Setting("gpt-48x1536", "8xRTX-TITAN", "8GiB", "fp32", 96)
LARGE_MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b")
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128)
LIMITS = ("24GiB", "32GiB", "40GiB", "48GiB", "64GiB")  # against memory, on 8 hosts
PAPERS_RULES = Rules(modes=(REPLICATE, FREE))
DEGREES = (2, 4, 8)
MICRO_BATCHES = 8  # for each stage of a pipeline: its bubble is then a ninth of the step at most
LARGEST_PIPELINED = 4  # samples of a micro-batch


def papers_settings() -> Iterator[Setting]:
    yield PUBLISHED
    for model in PAPERS_MODELS:
        for cluster, memory in PAPERS_CLUSTERS:
            yield Setting(model, cluster, memory, "fp32")


def scale_settings() -> Iterator[Setting]:
    for model in LARGE_MODELS:
        for hosts in HOSTS:
            yield Setting(model, f"{hosts}x8xH100-80GB", None, "bf16")
        for memory in LIMITS:
            yield Setting(model, "8x8xH100-80GB", memory, "bf16")


def figure(way: str, plan: Plan) -> Figure:
    step = plan.predicted
    samples = plan.batch_size * plan.accumulation
    return Figure(way, step.samples_per_second, plan.batch_size, samples, step.step_seconds, step.peak_bytes)


def data_parallel(setting: Setting, *, seconds: float, papers: bool) -> list[Figure]:
    """osdp and every baseline, each at its best batch and recompute; with `papers`, the paper's modes too."""
    training = Training.of(setting.precision)
    devices = resolve(setting.cluster, setting.memory)
    graph = captured(setting.model, training, devices.device)
    asked = {"search_seconds": seconds, "global_batch": setting.global_batch}
    try:
        plan = plan_graph(graph, devices, training, Rules(), **asked)
    except DoesNotFit as error:
        return [Figure("osdp", None, peak_bytes=error.peak_bytes)]
    found = [figure("osdp", plan)]
    for name in dict.fromkeys(each.name for each in plan.baselines):
        ways = [each for each in plan.baselines if each.name == name]
        best = max(ways, key=lambda each: each.samples_per_second if each.feasible else -each.peak_bytes)
        if best.feasible:
            samples = best.batch_size * best.accumulation
            step = best.step_seconds, best.peak_bytes
            found.append(Figure(name, best.samples_per_second, best.batch_size, samples, *step, str(best.recompute)))
        else:
            found.append(Figure(name, None, peak_bytes=best.peak_bytes))
    if papers:
        try:
            found.append(figure("paper's modes", plan_graph(graph, devices, training, PAPERS_RULES, **asked)))
        except DoesNotFit as error:
            found.append(Figure("paper's modes", None, peak_bytes=error.peak_bytes))
    return found


def layouts(setting: Setting) -> list[Figure]:
    """The best of a few tensor degrees, and of a few pipeline degrees, with the best plan inside each."""
    from bench_layouts import asked_of

    from osdp.layouts import Tried, priced
    from osdp.model.source import load_model

    devices, training = resolve(setting.cluster, setting.memory), Training.of(setting.precision)
    asked = asked_of(load_model(setting.model), devices, Batching(), training)

    def best(way: str, tried: list[Tried]) -> Figure:
        plans = [figure(f"{way}", each.plan) for each in tried if each.plan is not None]
        reasons = "; ".join(f"{max(each.tensor, each.pipeline)}: {each.reason}" for each in tried if each.plan is None)
        return max(plans, key=lambda each: each.rate or 0.0) if plans else Figure(way, None, reason=reasons)

    def pipelined(stages: int) -> Iterator[Tried]:
        batch, before = 1, 0.0
        while batch <= LARGEST_PIPELINED:
            found = priced(replace(asked, batching=Batching(batch, MICRO_BATCHES * stages)), 1, stages)
            yield found
            rate = found.plan.predicted.samples_per_second if found.plan else 0.0
            if rate <= before:
                return
            batch, before = 2 * batch, rate

    return [
        best("tensor", [priced(asked, degree, 1) for degree in DEGREES]),
        best("pipeline", [found for degree in DEGREES for found in pipelined(degree)]),
    ]


@dataclass(frozen=True)
class Known:
    """What a file of results has: the figures of each setting, one line for each setting and part."""

    path: Path

    def read(self) -> dict[tuple[Setting, str], list[Figure]]:
        if not self.path.exists():
            return {}
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {
            (Setting(**line["setting"]), line["part"]): [Figure(**each) for each in line["figures"]] for line in lines
        }

    def add(self, setting: Setting, part: str, figures: list[Figure], seconds: float) -> None:
        about = {"setting": asdict(setting), "part": part, "figures": [asdict(each) for each in figures]}
        with self.path.open("a") as file:
            file.write(json.dumps({**about, "seconds": seconds, "date": f"{datetime.now(UTC):%Y-%m-%d}"}) + "\n")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--scale", action="store_true", help="the larger models on 8 to 1,024 H100")
    arguments.add_argument("--layouts", action="store_true", help="tensor and pipeline parallelism too")
    arguments.add_argument("--models", type=lambda text: text.split(","), help="default: all of them")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each search at most (default: 10)")
    arguments.add_argument("--results", type=Path, default=RESULTS, help="what is known, one line for each figure")
    arguments.add_argument("--page", type=Path, help="write what is known as a page of the documentation, with plots")
    wanted = arguments.parse_args()
    known = Known(wanted.results)
    if wanted.page is not None:
        found = known.read()
        wanted.page.write_text(page(found, PUBLISHED))
        draw(found, wanted.page.parent)
        return 0
    part = "layouts" if wanted.layouts else "data"
    for setting in scale_settings() if wanted.scale else papers_settings():
        is_wanted = wanted.models is None or setting.model in wanted.models
        if not is_wanted or (setting, part) in known.read() or (wanted.layouts and setting == PUBLISHED):
            continue
        print(setting, file=sys.stderr, flush=True)
        papers = not wanted.scale
        made = layouts(setting) if wanted.layouts else data_parallel(setting, seconds=wanted.seconds, papers=papers)
        known.add(setting, part, made, wanted.seconds)
    deliver({"Predicted samples/s, each way at its best batch and recompute": rows(known.read())}, as_json=wanted.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
