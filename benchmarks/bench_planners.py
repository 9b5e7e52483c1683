"""Planners side by side: osdp's, the original's, torch's own and Galvatron's, on the same problems, by one measure.

    python benchmarks/bench_planners.py                       # all problems; goes on where it was
    python benchmarks/bench_planners.py --cases gpt2-xl --planners "osdp,Galvatron's core"
    python benchmarks/bench_planners.py --page docs/benchmarks/planners.md    # of what is known

Every answer is made a choice of osdp's tables and judged by osdp's time model and timeline, and, but for --no-dry-run,
by the peak of one step of real FSDP2 on fake tensors. The original's is the table over megabytes of `table_search`.
torch's needs pulp and pwlf (the extra `rivals`). Galvatron's needs `galvatron_dp_core`, which its package compiles:
its search engine does not import without apex and GPUs. A planner that is not installed is left out, and said so.
Seconds are of the CPU, for all batch sizes that the planner was tried at. Nothing here was run on an accelerator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from common import Row, deliver, parser
from planners.judge import Answer, Case, cpu_timed, judged

from osdp.cost.tables import Rules
from osdp.errors import DoesNotFit
from osdp.planning import plan_graph

RESULTS = Path(__file__).parent / "results" / "planners.jsonl"
CASES = (
    Case("gpt-small-27m", "8xA100-40GB", "2GiB"),
    Case("gpt2-xl", "8xA100-40GB", "10GiB"),
    Case("gpt2-xl", "8xA100-40GB", "24GiB"),
    Case("gpt-pyramid", "8xRTX-TITAN", "8GiB", "fp32"),
    Case("gpt-pyramid", "8xRTX-TITAN", "16GiB", "fp32"),
    Case("llama3-8b", "8xA100-80GB", "30GiB"),
    Case("llama3-8b", "8xA100-80GB", "60GiB"),
)
Planner = Callable[..., Answer | None]
Known = Mapping[tuple[Case, str], Answer | None]


def osdp(case: Case, *, dry: bool, search_seconds: float) -> Answer | None:
    def search() -> object:
        return plan_graph(case.graph, case.devices, case.training, Rules(), search_seconds=search_seconds)

    try:
        plan, used = cpu_timed(search)
    except DoesNotFit:
        return None
    return judged("osdp", case, plan, seconds=used, dry=dry, notes=f"gap {100 * plan.certificate.gap:.1f} %")


def planners(search_seconds: float) -> dict[str, Planner]:
    """Those that are installed."""
    from planners.layer_tables import galvatron, original

    def own(case: Case, *, dry: bool) -> Answer | None:
        return osdp(case, dry=dry, search_seconds=search_seconds)

    found: dict[str, Planner] = {"osdp": own, "OSDP's table": original}
    if _has("torch's sac_milp", "pulp", "pwlf"):
        from planners.sac import sac

        found["torch's sac_milp"] = sac
    if _has("Galvatron's core", "galvatron_dp_core"):
        found["Galvatron's core"] = galvatron
    return found


def _has(planner: str, *modules: str) -> bool:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        print(f"{planner} is left out: {', '.join(missing)} is not installed", file=sys.stderr)
    return not missing


def read(path: Path) -> dict[tuple[Case, str], Answer | None]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        (Case(**line["case"]), line["planner"]): Answer(**line["answer"]) if line["answer"] else None for line in lines
    }


def add(path: Path, case: Case, planner: str, answer: Answer | None) -> None:
    about = {"case": asdict(case), "planner": planner, "answer": asdict(answer) if answer else None}
    with path.open("a") as file:
        file.write(json.dumps({**about, "date": f"{datetime.now(UTC):%Y-%m-%d}"}) + "\n")


def rows(known: Known) -> list[Row]:
    table = []
    for (case, planner), answer in known.items():
        row: Row = {"model": case.model, "cluster": case.cluster, "memory": case.memory, "planner": planner}
        own = known.get((case, "osdp"))
        if answer is None:
            table.append({**row, "fits": "no plan"})
            continue
        table.append(
            {
                **row,
                "batch": answer.batch,
                "samples/s": answer.samples_per_second,
                "osdp / it": own.samples_per_second / answer.samples_per_second if own else None,
                "peak GiB": answer.measured_peak / 2**30,
                "limit GiB": answer.limit_bytes / 2**30,
                "peak by": "timeline" if answer.dry_run_bytes is None else "dry run",
                "fits": answer.fits,
                "search s": answer.search_seconds,
                "notes": answer.notes,
            }
        )
    return table


PAGE = """# Planners side by side

Several planners on the same problems: the same model, devices, precision and memory limit, each at its best batch.
Every answer is made a choice of osdp's tables and judged by **osdp's time model** (samples per second of all devices,
predicted: nothing here was run on an accelerator) and by its peak: that of a dry run, one step of the real FSDP2 on
fake tensors, where there was one, else of osdp's timeline, which tests hold equal to it. `search s` is CPU time for all
batch sizes that were tried, tables included. osdp's searches stop after a few seconds; the notes say how far from the
proven bound they then were.

- **OSDP's table**: the search of the original's released code, [written anew](planning.md), all megabytes of a layer at
  once, where the released one fills single cells in Python. Given: each layer's seconds and megabytes from osdp's
  tables, replicated or freed, without recompute, selective and full. It cannot express overlap of communication with
  computation, nor a peak: what layers need while they run is one number for the model, here as little as the answer
  needs, found by trial. Nor has it units below a block, or a layer kept from forward to backward. The original's
  splitting of operators, which comes before its search, is not in it.
- **Galvatron's core**: the compiled dynamic programming of `hetu-galvatron` 2.4.0. Given the same, with ZeRO-2 (keep)
  too, full recompute or none; seconds added up, and also the longer of a layer's compute and communication: the better
  counts. It cannot express what the table cannot, but for keep. Its tensor, sequence and pipeline parallelism are
  outside of these problems, and its own cost models are not used.
- **torch's sac_milp**: `torch.distributed._tools.sac_ilp`, under FSDP2. Given: torch's own estimators on fake tensors,
  their roofline at the catalogue's rates; blocks as its units; a budget less what it does not count, corrected up to
  twice by osdp's timeline; the batch sizes of FSDP at its best with each recompute, and one between. It cannot
  express how parameters are sharded (every block is freed), communication, optimizer states, gathered parameters, or
  the batch. The shares of activations that it discards are rounded to none, selective or full.

Galvatron's search engine itself does not import without its CUDA dependencies (`galvatron.core` imports apex through
Megatron). Its core builds alone, from the package's one C++ file, and is called as its `DPAlg` does. AutoParallel of
PyTorch's team is not on PyPI: the package of that name, 0.2.0, is a decorator for joblib of another author.

"""


def page(known: Known) -> str:
    found = rows(known)
    keys = list(dict.fromkeys(key for row in found for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    for row in found:
        lines.append("| " + " | ".join(_cell(row.get(key)) for key in keys) + " |")
    return PAGE + "\n".join(lines) + "\n\n" + verdict(found)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def verdict(found: Sequence[Row]) -> str:
    """How osdp compares with each planner, over the problems that both solved."""
    lines = []
    for planner in dict.fromkeys(row["planner"] for row in found):
        ratios = [row["osdp / it"] for row in found if row["planner"] == planner and row.get("osdp / it")]
        if planner != "osdp" and ratios:
            least, most = min(ratios), max(ratios)
            lines.append(
                f"- {planner}: osdp's plans are {least:.2f} to {most:.2f} times as fast, {len(ratios)} problems"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", type=lambda text: text.split(","), help="models; default: all of them")
    arguments.add_argument("--planners", type=lambda text: text.split(","), help="default: all that are installed")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of osdp's search at most (default: 10)")
    arguments.add_argument("--no-dry-run", action="store_true", help="peaks of osdp's timeline only")
    arguments.add_argument("--results", type=Path, default=RESULTS, help="what is known, one line for each answer")
    arguments.add_argument("--page", type=Path, help="write what is known as a page of the documentation")
    wanted = arguments.parse_args()
    if wanted.page is not None:
        wanted.page.write_text(page(read(wanted.results)))
        return 0
    installed = planners(wanted.seconds)
    for case in CASES:
        for name, planner in installed.items():
            is_wanted = wanted.cases is None or case.model in wanted.cases
            is_wanted = is_wanted and (wanted.planners is None or name in wanted.planners)
            if is_wanted and (case, name) not in read(wanted.results):
                print(f"{name}: {case}", file=sys.stderr, flush=True)
                add(wanted.results, case, name, planner(case, dry=not wanted.no_dry_run))
    deliver({"Planners, judged by osdp": rows(read(wanted.results))}, as_json=wanted.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
