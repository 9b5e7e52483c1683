"""Claims: what the benchmarks beside other planners compute by themselves is right.

The table searches choose alike; a layer's seconds add up to the step where nothing overlaps; the roofline is the longer
of products and traffic; a share of activations becomes the nearest recompute; what is known of the paper's table is
read back, and its page says where osdp is below a baseline.
"""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import captured

from osdp.cluster import Cluster
from osdp.cost.tables import Rules, Tables, Uniform
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.recompute import Recompute
from osdp.search.evaluate import evaluate
from osdp.sharding import FREE, KEEP, REPLICATE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark as it is when it runs: its folder comes first."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_table_searches_find_the_same_seconds(script: Any) -> None:
    table = script("table_search")
    draw = random.Random(3)
    for _ in range(20):
        items = [[(draw.uniform(1, 9), draw.randrange(1, 12)) for _ in range(3)] for _ in range(5)]
        for megabytes in (4, 25, 60):
            found = [search(items, megabytes) for search in (table.by_option, table.lean, table.vectorised)]
            if found[0] is None:
                assert found == [None] * 3
                continue
            chosen = [[item[option] for item, option in zip(items, each, strict=True)] for each in found]
            assert all(sum(need for _, need in each) <= megabytes for each in chosen)
            seconds = [sum(second for second, _ in each) for each in chosen]
            assert seconds == pytest.approx([seconds[0]] * 3)


@pytest.mark.parametrize("mode", [REPLICATE, KEEP, FREE])
def test_the_seconds_of_layers_add_up_to_a_step_where_nothing_overlaps(script: Any, mode: Any) -> None:
    add = script("bench_against_table")
    cluster = replace(Cluster.parse("8xRTX-TITAN"), overlap=False)
    rules = Rules(split=False, granularities=(WHOLE,), two_levels=False)
    tables = Tables(captured("gpt-untied"), cluster, Training.of("fp32"), rules)
    problem = tables.problem(4, limit=1 << 40, recomputed=True if None not in tables.recompute_cases else None)
    choice = tables.uniform(problem, Uniform(mode, Recompute.FULL, False))
    assert choice is not None
    layers = [add.seconds_of(stage, each) for stage, each in zip(problem.stages, choice, strict=True)]
    assert sum(layers) == pytest.approx(evaluate(problem, choice).seconds)


def test_the_roofline_is_the_longer_of_products_and_traffic(script: Any) -> None:
    device = Cluster.parse("8xA100-40GB").device
    estimate = script("planners.roofline").roofline(device)
    wide, thin = torch.ones(256, 256), torch.ones(256, 1)
    for left, right in ((wide, wide), (wide, thin)):
        out, milliseconds = estimate(torch.ops.aten.mm.default, (left, right), None)
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        traffic = 4 * (left.numel() + right.numel() + out.numel())
        longer = max(device.matmul_seconds(flops, "fp32"), device.memory_seconds(traffic))
        assert milliseconds == pytest.approx(1000 * longer)
    assert estimate(torch.ops.aten.view.default, (wide, [-1]), {})[1] == 0.0


def test_a_share_of_activations_becomes_the_nearest_recompute(script: Any) -> None:
    nearest = script("planners.sac").nearest
    saved = {Recompute.NONE: 100, Recompute.SELECTIVE: 40, Recompute.FULL: 10}
    shares = {0.0: Recompute.NONE, 0.25: Recompute.NONE, 0.4: Recompute.SELECTIVE, 0.7: Recompute.SELECTIVE}
    for share, how in {**shares, 0.8: Recompute.FULL, 1.0: Recompute.FULL}.items():
        assert nearest(saved, share) is how


def test_what_is_known_of_the_papers_table_is_read_back(script: Any, tmp_path: Path) -> None:
    bench, page = script("bench_paper_table"), script("paper_page")
    known = bench.Known(tmp_path / "known.jsonl")
    assert known.read() == {}
    setting = page.Setting("gpt", "2x8xA100-40GB", "16GiB", "fp32")
    figures = [page.Figure("osdp", 9.0, 2, 4, 1.5, 7), page.Figure("DDP", None, peak_bytes=9)]
    known.add(setting, "data", figures, 3.0)
    known.add(setting, "layouts", [page.Figure("tensor", 12.0)], 3.0)
    assert known.read() == {(setting, "data"): figures, (setting, "layouts"): [page.Figure("tensor", 12.0)]}
    assert setting.devices == 16
    [row] = page.rows(known.read())
    assert (row["osdp"], row["DDP"], row["FSDP"], row["tensor"], row["osdp / best"]) == (9.0, "–", "", 12.0, None)
    assert "Tensor parallelism is faster than osdp's plan in 1 of 1." in page.verdict([row])


def test_the_page_says_where_osdp_is_below_a_baseline(script: Any) -> None:
    page = script("paper_page")

    def of(memory: str, own: float, usual: float) -> Any:
        found = [page.Figure("osdp", own), page.Figure("FSDP", usual), page.Figure("HSDP", usual / 2)]
        return (page.Setting("gpt", "8xA100-40GB", memory, "fp32"), "data"), found

    rows = page.rows(dict([of("8GiB", 8.0, 4.0), of("16GiB", 9.0, 10.0)]))
    assert [row["osdp / best"] for row in rows] == [2.0, 0.9]
    assert "least 0.900, most 2.000" in page.verdict(rows)
    narrower = page.rows(
        {
            (page.Setting("gpt", "8xA100-40GB", None, "fp32"), "data"): [
                page.Figure("osdp", 8.0),
                page.Figure("paper's modes", 10.0),
            ]
        }
    )
    assert "faster plan of the paper's modes alone, by up to 25.00 %" in page.verdict(narrower)
    assert "| 8GiB | 8 | " in page.page(dict([of("8GiB", 8.0, 4.0)]), page.Setting("other", "8xA100", None, "fp32"))
