"""Claims about `osdp whatif` and `osdp size`:

- Every combination is planned as `osdp plan` plans it; more memory or more devices are never slower.
- The smallest cluster reaches the target and the next smaller one that was tried does not; with prices the cheapest is
  first.
- A chart has a line for each combination and a mark for each case.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from small_models import captured

from osdp.api import resolve
from osdp.cli.main import main
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import OsdpError, UsageError
from osdp.planning import plan_graph
from osdp.report.sizing_page import chart_html, chart_of, chart_svg, round_ticks
from osdp.sizing import Asked, Case, Sized, Target, cases, ranked, read_memories, read_target, smallest, with_devices

KIB = 1024
ASKED = Asked(Training.of(), batch=2)
CLUSTER = resolve("2xRTX-3090", None)


@cache
def found() -> tuple[Case, ...]:
    memories = [2 * KIB**3, 4 * KIB**3, 8 * KIB**3]
    return tuple(cases([captured("gpt")], CLUSTER, memories=memories, devices=[1, 2, 4], asked=ASKED))


def test_every_combination_is_planned_as_a_plan_is() -> None:
    assert [(case.devices, case.memory_bytes >> 30) for case in found()] == [
        (devices, memory) for devices in (1, 2, 4) for memory in (2, 4, 8)
    ]
    plan = plan_graph(captured("gpt"), resolve("2x2xRTX-3090", "8GiB"), Training.of(), Rules(), batch=2)
    case = found()[-1]
    assert (case.nodes, case.devices) == (2, 4)
    assert case.samples_per_second == pytest.approx(plan.predicted.samples_per_second)
    assert case.peak_bytes == plan.predicted.peak_bytes
    assert case.tokens_per_second == pytest.approx(16 * plan.predicted.samples_per_second)


def test_what_does_not_fit_is_a_case_without_figures() -> None:
    (case,) = cases(
        [captured("gpt")], CLUSTER, memories=[1_500_000_000], devices=[2], asked=Asked(Training.of(), batch=1 << 20)
    )
    assert not case.fits and case.tokens_per_second is None


def test_sizes_and_targets_are_read_as_people_write_them() -> None:
    assert read_memories("16,24,40,80GiB") == [size << 30 for size in (16, 24, 40, 80)]
    assert read_memories("512MiB, 1GiB") == [512 << 20, 1 << 30]
    assert read_target("20000tok/s") == Target(20000.0, "tok/s")
    assert read_target("5e2 samples/s") == Target(500.0, "samples/s")
    for wrong in ("fast", "0tok/s", "20000", "1e99tok/s"):
        with pytest.raises(UsageError, match="throughput"):
            read_target(wrong)


def test_devices_keep_the_shape_of_nodes() -> None:
    cluster = Cluster.parse("2x8xA100-40GB")
    assert [(c.nodes, c.devices_per_node) for n in (1, 4, 8, 24) for c in [with_devices(cluster, n)]] == [
        (1, 1),
        (1, 4),
        (1, 8),
        (3, 8),
    ]
    with pytest.raises(UsageError, match="multiple of 8"):
        with_devices(cluster, 12)


def test_the_smallest_cluster_reaches_the_target_and_no_smaller_one_does() -> None:
    tried: list[Case] = []
    base = resolve("2xRTX-3090", None)
    wanted = 0.9 * 6 / 4 * (found()[6].tokens_per_second or 0)  # about what six devices reach
    target = Target(wanted, "tok/s", 1e9, 2.0)
    sized = smallest(captured("gpt"), base, target, ASKED, price=2.0, say=tried.append)
    assert sized.reached and sized.rate >= target.per_second
    below = [case for case in tried if case.devices < sized.case.devices]
    assert below and all(target.rate(case) < target.per_second for case in below)
    assert sized.price_per_hour == 2.0 * sized.case.devices
    assert sized.days == pytest.approx(1e9 / sized.rate / 86400)
    assert sized.cost == pytest.approx(sized.price_per_hour * 24 * (sized.days or 0))


def test_the_cheapest_that_reaches_it_is_first() -> None:
    case = found()[0]
    one, two, three = (
        Sized(name, name, case, reached, 1.0, 1.0, 1.0, cost)
        for name, reached, cost in (("slow", False, 1.0), ("dear", True, 9.0), ("cheap", True, 5.0))
    )
    assert [each.device for each in ranked([one, two, three])] == ["cheap", "dear", "slow"]
    with pytest.raises(OsdpError, match="lower the target"):
        ranked([one])


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (3_014_626, [0, 1_000_000, 2_000_000, 3_000_000]),
        (5, [0, 1, 2, 3, 4, 5]),
        (0.11, [0, 0.025, 0.05, 0.075, 0.1]),
    ],
)
def test_an_axis_has_round_numbers(top: float, ticks: list[float]) -> None:
    assert round_ticks(top) == pytest.approx(ticks)


def test_memory_on_an_axis_has_its_unit() -> None:
    chart = chart_of("gpt", [case for case in found() if case.devices == 4])
    texts = [each.text for each in ElementTree.fromstring(chart_svg(chart)).iter() if each.text]
    assert {"2 GiB", "4 GiB", "8 GiB"} <= {*texts} and "memory of each device" in texts


def test_a_chart_has_a_line_for_each_combination() -> None:
    chart = chart_of("gpt", found())
    assert [len(series.points) for series in chart.series] == [3, 3, 3]
    root = ElementTree.fromstring(chart_svg(chart))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("polyline") == 3 and tags.count("circle") == 9
    assert "<svg" in chart_html(chart)


def test_the_commands_print_draw_and_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, common = tmp_path / "chart.svg", ("--quiet", "--search-seconds", "1", "--global-batch", "16")
    what = ("whatif", "gpt-tiny", "--cluster", "8xRTX-TITAN", "--devices", "2,4", "--seq-len", "16")
    assert main([*what, *common, "-o", str(chart)]) == 0
    out = capsys.readouterr().out
    assert "gpt-tiny on RTX-TITAN" in out and chart.exists() and max(map(len, out.splitlines()[:-1])) <= 80
    assert main([*what, "--devices", "12"]) == 2
    assert main([*what, "-o", str(tmp_path / "chart.png")]) == 2
    prices = tmp_path / "prices.toml"
    prices.write_text('[prices]\n"RTX-TITAN" = 0.5\n')
    size = ("size", "gpt-tiny", "--seq-len", "16", "--tokens", "1e9", "--days", "1", "--prices", str(prices))
    capsys.readouterr()
    assert main([*size, *common, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    best = document["clusters"][0]
    assert best["reached"] and best["cost"] == pytest.approx(best["price_per_hour"] * 24 * best["days"])
    assert main(["size", "gpt-tiny", "--device", "RTX-TITAN"]) == 2
    prices.write_text('[prices]\n"RTX-TITAN" = -1\n')
    assert main([*size, *common]) == 2
