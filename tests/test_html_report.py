"""Claims about `osdp report`:

- What the page shows is what the plan and the cost model say: peaks, steps, rates, units, the proof.
- The file is one page that asks for nothing, in a real Chromium: every picture is drawn, by light and by dark, wide and
  narrow, without a message on the console.
- A pointer and the keyboard read the same values, and every way to train can be shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from browser import Browser, chromium
from small_models import captured

from osdp.api import resolve
from osdp.cli.main import main
from osdp.cluster import format_bytes
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.report.html import report_html
from osdp.report.measurements import Measurement, read_measurements
from osdp.report.page import HostMemory
from osdp.report.report_page import THE_PLAN, ReportPage, proof_sentence, report_page

MEASURED = (Measurement("osdp train, 9 steps", 0.5, 1 << 20), Measurement("osdp verify, a dry run", None, 1 << 21))


@cache
def made() -> Plan:
    cluster = resolve("2x2xRTX-3090", "640KiB")
    cluster = replace(cluster, reserve_fraction=0.0)
    return plan_graph(captured("gpt"), cluster, Training.of(), Rules(), global_batch=16)


@cache
def page() -> ReportPage:
    return report_page(made(), captured("gpt"), MEASURED)


# ---- computed


def test_the_first_way_is_the_plan_and_has_its_figures() -> None:
    plan, shown = made(), page().ways[0]
    assert shown.name == THE_PLAN
    assert shown.peak_bytes == plan.predicted.peak_bytes == max(shown.memory.totals)
    assert shown.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert shown.samples_per_second == pytest.approx(plan.predicted.samples_per_second)
    assert shown.memory.places[shown.memory.peak] == plan.predicted.peak_at


def test_the_usual_ways_have_the_figures_of_the_plan_file() -> None:
    plan = made()
    shown = page().ways[1:]
    assert len(shown) == len(plan.baselines) >= 6
    for way, baseline in zip(shown, plan.baselines, strict=True):
        assert way.name.startswith(baseline.name) and way.name.endswith("recompute") == bool(baseline.recompute)
        assert way.fits == baseline.feasible
        if baseline.feasible:
            assert way.step_seconds == pytest.approx(baseline.step_seconds)
            assert way.peak_bytes == baseline.peak_bytes
            assert (way.batch_size, way.accumulation) == (baseline.batch_size, baseline.accumulation)


def test_memory_curves_lose_no_byte_of_the_timeline() -> None:
    step = step_graph_of(made(), captured("gpt"))
    curve, timeline = page().ways[0].memory, step.timeline()
    assert list(curve.seconds) == sorted(curve.seconds)
    assert len(curve.seconds) == len(curve.places) + 1 == len(curve.totals) + 1
    moments = {timeline.moment(column).nbytes for column in range(len(timeline.total))}
    assert set(curve.totals) <= moments
    assert curve.totals[-1] == timeline.total[-1]  # the optimizer is a sample of its own


def test_rate_curves_end_where_the_memory_does() -> None:
    for curve in page().rates:
        fitting = [point.batch_size for point in curve.points if point.fits]
        assert max(fitting, default=0) == curve.largest
        assert all(point.fits == (point.batch_size <= curve.largest) for point in curve.points)
    shown = page().ways[0]
    at = next(point for point in page().rates[0].points if point.batch_size == shown.batch_size)
    assert at.samples_per_second == pytest.approx(shown.samples_per_second)


def test_the_strip_has_every_unit_once() -> None:
    units = [box.unit for stage in page().stages for box in stage.units]
    assert sorted(units, key=lambda unit: unit.name) == sorted(made().units, key=lambda unit: unit.name)
    waited = sum(box.stall_seconds for stage in page().stages for box in stage.units)
    assert waited == pytest.approx(page().ways[0].stall_seconds)


def test_measurements_stand_beside_predictions() -> None:
    plan = made()
    assert [(each.what, each.measured) for each in page().comparisons] == [
        ("step", 0.5),
        ("peak memory", 1 << 20),
        ("peak memory", 1 << 21),
    ]
    assert page().comparisons[0].error == pytest.approx(plan.predicted.step_seconds / 0.5 - 1)


def test_the_proof_is_a_sentence() -> None:
    plan = made()
    optimal = replace(plan.certificate, status="optimal")
    assert "solved to optimality" in proof_sentence(optimal, plan)
    late = replace(plan.certificate, status="time limit", bound=plan.predicted.samples_per_second / 0.9)
    assert "at most 10.00 % is left" in proof_sentence(late, plan)


def test_measurements_are_read_from_what_the_commands_print(tmp_path: Path) -> None:
    end = {"event": "end", "steps": 7, "measured_step_seconds": 0.25, "measured_peak_bytes": 123}
    trained, verified, wrong = (tmp_path / name for name in ("train.jsonl", "verify.json", "wrong.json"))
    trained.write_text(json.dumps({"event": "start"}) + "\n" + json.dumps(end) + "\n")
    verified.write_text(json.dumps({"version": 1, "measured_peak_bytes": 456}, indent=2))
    found = read_measurements([trained, verified])
    assert found == [
        Measurement("osdp train, 7 steps", 0.25, 123),
        Measurement("osdp verify, a dry run", None, 456),
    ]
    for text in ("{}", "no JSON", json.dumps({"measured_peak_bytes": "many"})):
        wrong.write_text(text)
        with pytest.raises(Exception, match="osdp verify --json"):
            read_measurements([wrong])


# ---- drawn, in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(page()))
    return path.as_uri()


def shown_text(browser: Browser, chart: str) -> str:
    return browser.value("document.querySelector(`#${arguments[0]} .tip:not([hidden])`)?.innerText || ''", chart)


@pytest.mark.parametrize(("width", "dark"), [(1180, False), (1180, True), (390, False)])
def test_everything_is_drawn_without_requests_or_messages(
    browser: Browser, address: str, width: int, dark: bool
) -> None:
    browser.open(address, width=width, dark=dark)
    assert browser.value("document.documentElement.dataset.ready") == "true"
    assert browser.value("document.querySelectorAll('#memory-chart polygon').length") == 8
    spans = browser.value("document.querySelectorAll('#streams-chart .span').length")
    assert spans == len(page().ways[0].spans)
    assert browser.value("document.querySelectorAll('#rates-chart circle').length") >= 1
    assert browser.value("document.querySelectorAll('#strip button').length") == len(page().stages)
    assert browser.value("document.getElementById('proof').innerText") == page().proof
    assert browser.value("document.querySelectorAll('#measured tbody tr').length") == 3
    assert browser.value("document.documentElement.scrollWidth") <= width  # nothing sticks out on a phone
    ink = browser.value("getComputedStyle(document.body).color")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) > 380) == dark
    assert browser.console == []
    assert set(browser.requests) <= {address, "data:,"}


def test_a_pointer_reads_bytes_and_milliseconds(browser: Browser, address: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    browser.open(address)
    for chart, expected in (
        ("memory-chart", "saved activations"),
        ("streams-chart", "compute"),
        ("rates-chart", "micro-batch"),
    ):
        element = browser.driver.find_element(By.ID, chart)
        browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(browser.driver).move_to_element(element).perform()
        assert expected in shown_text(browser, chart)
    cell = browser.driver.find_elements(By.CSS_SELECTOR, "#strip button")[1]
    ActionChains(browser.driver).move_to_element(cell).perform()
    stage = page().stages[1]
    assert stage.name in browser.value("document.getElementById('detail').innerText")
    assert stage.units[0].unit.mode in browser.value("document.getElementById('detail').innerText")
    assert browser.console == []


def test_the_keyboard_does_what_the_pointer_does(browser: Browser, address: str) -> None:
    from selenium.webdriver import Keys
    from selenium.webdriver.common.by import By

    browser.open(address)
    memory = browser.driver.find_element(By.ID, "memory-chart")
    peak = format_bytes(page().ways[0].peak_bytes)
    assert peak in memory.get_attribute("aria-valuetext")  # at rest it reads the peak
    memory.send_keys(Keys.HOME)
    first = memory.get_attribute("aria-valuetext")
    assert first.startswith("0") and shown_text(browser, "memory-chart")
    memory.send_keys(Keys.ARROW_RIGHT)
    assert memory.get_attribute("aria-valuetext") != first
    memory.send_keys(Keys.ESCAPE)
    assert not shown_text(browser, "memory-chart")
    streams = browser.driver.find_element(By.ID, "streams-chart")
    streams.send_keys(Keys.END, "+")
    assert "whole" not in streams.get_attribute("aria-valuetext")
    buttons = browser.driver.find_elements(By.CSS_SELECTOR, "#ways button")
    buttons[1].send_keys(Keys.ENTER)
    assert [each.get_attribute("aria-pressed") for each in buttons[:2]] == ["false", "true"]
    assert browser.value("document.getElementById('memory-summary').innerText").startswith(page().ways[1].name)
    cell = browser.driver.find_element(By.CSS_SELECTOR, "#strip button")
    cell.send_keys(Keys.ARROW_RIGHT)
    assert browser.value("[...document.getElementById('strip').children].indexOf(document.activeElement)") == 1
    assert browser.value("document.querySelector('#detail h3').innerText") == page().stages[1].name
    outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # focus is seen
    assert browser.console == []


def test_every_control_has_a_name(browser: Browser, address: str) -> None:
    browser.open(address)
    nameless = browser.value(
        "[...document.querySelectorAll('button, [role=slider], [tabindex=\"0\"]')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.innerText.trim())).length"
    )
    assert nameless == 0
    assert browser.value("document.documentElement.lang") == "en"


def test_what_is_on_the_host_and_what_a_unit_does_once_a_step_are_said(browser: Browser, tmp_path: Path) -> None:
    found = page()
    at = next(index for index, stage in enumerate(found.stages) if stage.is_block)
    stages = list(found.stages)
    first = stages[at].units[0]
    joined = replace(first, unit=replace(first.unit, reduced_with="norm"))
    stages[at] = replace(stages[at], recompute=Recompute.ON_HOST, units=(joined, *stages[at].units[1:]))
    host = HostMemory(1 << 30, 2 << 30, 4 << 30, 0.25, is_assumed=True, blocks=1)
    groups = tuple(
        replace(group, units=tuple(replace(unit, gather_once=True) for unit in group.units))
        for group in found.plan.groups
    )
    file = tmp_path / "host.html"
    file.write_text(
        report_html(replace(found, stages=tuple(stages), plan=replace(found.plan, host=host, groups=groups)))
    )
    browser.open(file.as_uri())
    assert "1.0 GiB" in browser.value("document.querySelector('.tiles').innerText")
    words = browser.value("document.body.innerText")
    assert "the input of 1 block are on the host" in words
    assert "gathered once a step, by the first micro-batch, and freed by the last: all units" in words
    assert browser.value("document.querySelectorAll('#strip button')[arguments[0]].textContent", at) == "↑"
    browser.value("document.querySelectorAll('#strip button')[arguments[0]].focus()", at)
    detail = browser.value("document.getElementById('detail').innerText")
    assert "its input is on the host until then" in detail and "reduced with norm" in detail
    assert browser.console == []


# ---- the command


def test_the_command_writes_one_file(tiny_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tiny_plan), tmp_path / "report.html"
    capsys.readouterr()
    assert main(["report", path, "-o", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == f"saved to {out}\n"
    text = out.read_text()
    assert "gpt-tiny" in text and len(text) < 1_000_000
    assert not re.search(r"(src|href)=\"(?!data:|#)", text) and "@import" not in text and "url(http" not in text
    assert main(["report", path, "--measured", str(tmp_path / "none.json"), "--quiet"]) == 2
