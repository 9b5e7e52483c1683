"""Published FSDP runs on accelerators, priced by the catalogue as the plans that were run.

Every row of a CSV is captured as the model that ran and priced with its devices, sharding, recompute, micro-batch and
accumulation. Tables: every run, medians by device, number of devices, model and length; whether the micro-batch is
predicted to fit; cross-validation of the calibrated figures. Capturing takes about 3 minutes, cross-validation 1.

With `--others` runs are priced that nothing was fitted to: MPT runs of another part of the same table, and Llama models
under FSDP and ZeRO from several sources.

    python benchmarks/bench_published.py [--csv FILE] [--fit] [--plots FOLDER] [--json] [--others]
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from common import Row, deliver, met, parser
from published.calibration import Case, cross_validate, fit
from published.llamas import PricedLlama, llama_rows, read_llamas
from published.llamas import price as price_llama
from published.plots import agreement, scaling
from published.runs import HERE, Run, graph_of, layout_of, read_runs
from published.tables import (
    Priced,
    by_kernel,
    every_run,
    fitted_figures,
    folds,
    price,
    summaries,
    summary,
    weak_scaling,
)

MEDIAN, NINE_IN_TEN, FITTING = 8.0, 20.0, 97.0  # per cent
KEYS = {
    "device": lambda run: run.cluster.device.name,
    "number of devices": lambda run: run.gpus,
    "model": lambda run: run.model,
}
SCALED = (("mpt-7b", "a100_40gb"), ("mpt-350m", "a100_40gb"), ("mpt-13b", "h100_80gb"), ("mpt-1b", "h100_80gb"))


def main() -> None:
    arguments = _arguments()
    if arguments.others:
        deliver(_others(arguments.plots), as_json=arguments.json)
        return
    runs = read_runs(arguments.csv)
    priced_runs = [run for run in runs if run.is_priced]
    cases = [Case(run, layout_of(run, graph_of(run))) for run in priced_runs]
    priced = [price(case) for case in cases]
    tables: dict[str, Sequence[Row]] = {"Every run: tokens per second and device": every_run(priced)}
    for name, key in {**KEYS, "length": lambda run: run.seq_len}.items():
        tables[f"Error of throughput by {name}"] = summaries(priced, key)
    whole = fit(cases)
    if arguments.fit:
        tables["Figures fitted on these runs"] = fitted_figures(whole.values)
    for name, key in KEYS.items():
        tables[f"Cross-validation: runs of one {name} left out of the fit"] = folds(cross_validate(cases, whole, key))
    tables["Weak scaling: tokens per second and device"] = _scaling_rows(cases)
    tables["Error of throughput by attention kernel"] = by_kernel(cases)
    tables["Targets"] = _targets(priced, tables)
    deliver(tables, as_json=arguments.json)
    left = len(runs) - len(priced_runs)
    if left and not arguments.json:
        print(f"\n{left} runs with fp8 products are not priced: no plan has them.")
    if arguments.plots:
        _draw(priced, cases, arguments.plots)


def _others(plots: Path | None) -> dict[str, Sequence[Row]]:
    """Runs that the catalogue was not calibrated on."""
    cases = [Case(run, layout_of(run, graph_of(run))) for run in read_runs(HERE / "mpt-others.csv")]
    priced = [price(case) for case in cases]
    llamas = [price_llama(run) for run in read_llamas()]
    if plots:
        _draw_others(priced, llamas, plots)
    sources = sorted({each.run.source for each in llamas})
    fitting = 100 * sum(each.fits for each in priced) / len(priced)
    errors = [each.error for each in priced]
    return {
        "Other MPT runs: tokens per second and device": every_run(priced),
        "Other MPT runs: error of throughput": [
            *summaries(priced, KEYS["device"]),
            {**summary("all", errors), "fit %": round(fitting, 1)},
        ],
        "Other MPT runs: error of throughput by attention kernel": by_kernel(cases),
        "Llama models: tokens per second and device": llama_rows(llamas),
        "Llama models: error of throughput": [
            *(summary(name, [each.error for each in llamas if each.run.source == name]) for name in sources),
            summary("all", [each.error for each in llamas]),
            summary("all, with the default kernel", [each.error_with_default for each in llamas]),
        ],
        "Llama models: error of peaks": [
            summary("all", [error for each in llamas if (error := each.peak_error) is not None])
        ],
    }


def _arguments() -> Namespace:
    made = parser(__doc__)
    made.add_argument("--csv", type=Path, default=HERE / "mpt-fsdp.csv", help="the runs (default: the MPT table)")
    made.add_argument("--others", action="store_true", help="price runs that the catalogue was not calibrated on")
    made.add_argument("--fit", action="store_true", help="print the figures that these runs ask for")
    made.add_argument("--plots", type=Path, help="write plots as SVG into this folder")
    return made.parse_args()


def _targets(priced: Sequence[Priced], tables: dict[str, Sequence[Row]]) -> list[Row]:
    every = summary("all", [each.error for each in priced])
    fitting = 100 * sum(each.fits for each in priced) / len(priced)
    rows = [
        {"figure": "median error %", "value": every["median %"], "target": MEDIAN},
        {"figure": "error of nine in ten %", "value": every["90th %"], "target": NINE_IN_TEN},
    ]
    for name in KEYS:
        last = tables[f"Cross-validation: runs of one {name} left out of the fit"][-1]
        rows += [
            {"figure": f"median error %, {name} left out", "value": last["median %"], "target": MEDIAN},
            {"figure": f"error of nine in ten %, {name} left out", "value": last["90th %"], "target": NINE_IN_TEN},
        ]
    rows = [{**row, "": met(row["value"], row["target"])} for row in rows]
    rows.append(
        {
            "figure": "micro-batches predicted to fit %",
            "value": round(fitting, 1),
            "target": FITTING,
            "": met(fitting, FITTING, least=True),
        }
    )
    return rows


def _scaled(cases: Sequence[Case]) -> list[Case]:
    """Of each model and device, the case with the most devices at the usual length."""
    found = []
    for model, gpu in SCALED:
        mine = [c for c in cases if (c.run.model, c.run.gpu, c.run.seq_len) == (model, gpu, 2048)]
        if mine:
            found.append(max(mine, key=lambda case: case.run.gpus))
    return found


def _label(run: Run) -> str:
    return f"{run.model}, {run.cluster.device.name}, {run.micro_batch} a device"


def _scaling_rows(cases: Sequence[Case]) -> list[Row]:
    return [
        {"run": _label(case.run), **{str(gpus): round(rate) for gpus, rate in weak_scaling(case)}}
        for case in _scaled(cases)
    ]


def _draw(priced: Sequence[Priced], cases: Sequence[Case], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    points: dict[str, list[tuple[float, float]]] = {}
    for each in priced:
        pair = each.run.tokens_per_second_per_gpu, each.tokens_per_second_per_gpu
        points.setdefault(each.run.cluster.device.name, []).append(pair)
    agreement(points, folder / "published-throughput.svg")
    lines = {_label(case.run): weak_scaling(case) for case in _scaled(cases)}
    seen = {
        _label(case.run): [
            (other.run.gpus, other.run.tokens_per_second_per_gpu)
            for other in cases
            if _same_but_scale(other.run, case.run)
        ]
        for case in _scaled(cases)
    }
    scaling(lines, seen, folder / "published-scaling.svg")


def _draw_others(priced: Sequence[Priced], llamas: Sequence[PricedLlama], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    points: dict[str, list[tuple[float, float]]] = {}
    for name, each in (*(("MPT", each) for each in priced), *(("Llama", each) for each in llamas)):
        chip = each.run.cluster.device.name.partition("-")[0]
        pair = each.run.tokens_per_second_per_gpu, each.tokens_per_second_per_gpu
        points.setdefault(f"{name}, {chip}", []).append(pair)
    agreement(dict(sorted(points.items())), folder / "published-others.svg")


def _same_but_scale(one: Run, other: Run) -> bool:
    keys = ("model", "gpu", "seq_len", "micro_batch", "accumulation", "sharding", "full_recompute", "precision")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


if __name__ == "__main__":
    main()
