"""Claims: a plan shows itself in a notebook, and the example notebook runs from its first cell to its last."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from osdp.planfile import Plan, unpriced_plan

NOTEBOOK = Path(__file__).parents[1] / "examples" / "plan.ipynb"


def test_a_plan_is_a_card_with_its_figures(plan: Plan) -> None:
    html = plan._repr_html_()
    ElementTree.fromstring(html.replace("<br>", "<br/>"))  # every tag is closed
    assert "toy on 2x4xA100-40GB" in html and "32.0 samples/s" in html and "30.0 GiB" in html
    assert "fully sharded" in html and "does not fit" in html
    assert "<script" not in html
    hostile = replace(plan, model=replace(plan.model, name="<script>alert(1)</script>"))
    assert "<script" not in hostile._repr_html_()


def test_a_plan_that_predicts_nothing_is_shown_too(plan: Plan) -> None:
    how = {"precision": plan.precision, "reduce_dtype": plan.reduce_dtype, "optimizer": plan.optimizer}
    assert "samples/s" not in unpriced_plan("toy", plan.units, plan.cluster, **how, batch_size=1)._repr_html_()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that run notebooks
        import nbformat
        from nbclient import NotebookClient

        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
        )
        client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("samples/s" in output.get("data", {}).get("text/html", "") for output in shown)
    assert "<svg" not in (tmp_path / "report.html").read_text()[:200] and (tmp_path / "report.html").exists()
    assert any("recompute" in output.get("text", "") for output in shown)
