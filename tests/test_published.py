"""Published runs on accelerators are predicted: throughput within 20 %, weak scaling falls, the micro-batch fits.

The table of all runs is benchmarks/bench_published.py; here are runs of every device, of 8 to 512 of them, and of short
and long sequences, and what the comparison stands on: runs that are called others were not calibrated on, the models
that ran have the published numbers of parameters, links and rates that a source states replace the catalogue's, the
fused loss is the cross entropy, and a figure fitted on made-up runs is found again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.published.calibration import FIGURES, Case, catalogue_figures, cluster_with, cross_validate, fit
from benchmarks.published.llamas import read_llamas
from benchmarks.published.runs import (
    HERE,
    FusedCrossEntropy,
    Run,
    graph_of,
    layout_of,
    predicted_seconds,
    read_runs,
    step_of,
)
from benchmarks.published.tables import price, summary, weak_scaling
from osdp.cluster import Cluster

RUNS = read_runs(HERE / "mpt-fsdp.csv")
OTHERS = read_runs(HERE / "mpt-others.csv")
CHOSEN = [  # model, tokens, devices, device, recomputed
    ("mpt-125m", 2048, 128, "a100_40gb", False),
    ("mpt-760m", 8192, 8, "a100_80gb", False),
    ("mpt-760m", 2048, 16, "h100_80gb", False),
    ("mpt-1b", 2048, 512, "h100_80gb", False),
    ("mpt-1b", 2048, 128, "h100_80gb", False),
    ("mpt-7b", 2048, 64, "a100_40gb", True),
    ("mpt-7b", 65536, 8, "a100_80gb", True),
]


def chosen(model: str, tokens: int, gpus: int, gpu: str, recompute: bool) -> Case:
    key = model, tokens, gpus, gpu, recompute
    run = next(r for r in RUNS if (r.model, r.seq_len, r.gpus, r.gpu, r.full_recompute) == key)
    return Case(run, layout_of(run, graph_of(run)))


@pytest.mark.parametrize("key", CHOSEN, ids=lambda key: "-".join(map(str, key[:4])))
def test_a_published_run_is_predicted(key: tuple[str, int, int, str, bool]) -> None:
    case = chosen(*key)
    assert case.layout.graph.num_parameters == case.run.parameters
    found = price(case)
    assert abs(found.error) < 0.2, found
    assert found.fits


def test_a_run_that_nothing_was_fitted_to_is_predicted() -> None:
    def setting(run: Run) -> Run:
        return replace(run, tokens_per_second_per_gpu=0.0, precision="", accumulation=0)

    assert not {setting(run) for run in RUNS} & {setting(run) for run in OTHERS}
    run = next(r for r in OTHERS if (r.model, r.seq_len, r.gpus, r.gpu) == ("mpt-1b", 16384, 8, "h100_80gb"))
    found = price(Case(run, layout_of(run, graph_of(run))))
    assert abs(found.error) < 0.05, found


def test_what_a_source_states_replaces_the_catalogue() -> None:
    by_source = {run.source: run.cluster for run in read_llamas()}
    a100 = Cluster.parse("16x8xA100-80GB")
    assert by_source["fms-fsdp"].network.bytes_per_second == a100.network.bytes_per_second / 4  # 400 of 1,600 Gbit/s
    assert by_source["a800-zero"].node_link.bytes_per_second == pytest.approx(a100.node_link.bytes_per_second * 2 / 3)
    assert by_source["torchtitan-202412"].device.memory_bytes_per_second == 2.4e12
    assert by_source["vectorlm"] == Cluster.parse("4xA100-80GB")


def test_weak_scaling_falls_as_published() -> None:
    """Published runs lose 3 to 8 % from 8 to 512 devices, those with little to compute more."""
    for key in (CHOSEN[3], CHOSEN[5]):
        rates = [rate for _, rate in weak_scaling(chosen(*key))]
        assert rates == sorted(rates, reverse=True)
        assert 0.03 < 1 - rates[-1] / rates[0] < 0.12


def test_runs_are_read_and_fp8_is_not_priced() -> None:
    assert len(RUNS) == 108
    assert {run.precision for run in RUNS if not run.is_priced} == {"amp_fp8"}
    assert RUNS[0].cluster.word == "64x8xH100-80GB"
    assert RUNS[0].step_seconds == pytest.approx(8 * 2048 / 2115)


def test_the_fused_loss_is_the_cross_entropy() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 11, requires_grad=True), torch.randint(11, (6,))
    expected = F.cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(expected, logits)
    copy = logits.detach().clone().requires_grad_()
    fused = FusedCrossEntropy.apply(copy * 1.0, targets).mean()
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(torch.autograd.grad(fused, copy)[0], gradient)


def test_fitted_figures_are_found_again_and_hold_for_runs_that_were_left_out() -> None:
    """Runs made up with other figures: the fit explains them, also those that it has not seen."""
    truth = np.log([0.95, 1.0, 0.9, 1.2, 1.0, 1.0, 1.5, 1.5, 1.4, 0.9])
    assert len(truth) == len(FIGURES)
    cases = []
    for case in (chosen(*key) for key in CHOSEN):
        seconds = predicted_seconds(step_of(case.run, case.layout, cluster_with(case.run, truth)))
        tokens = case.run.micro_batch * case.run.accumulation * case.run.seq_len
        cases.append(Case(replace(case.run, tokens_per_second_per_gpu=tokens / seconds), case.layout))
    whole = fit(cases)
    assert np.abs(whole.errors).max() < 0.02
    folds = cross_validate(cases, whole, lambda run: run.gpus)
    assert [fold.left_out for fold in folds] == [128, 16, 512, 64, 8]
    # without the runs on 8 devices there are no long sequences, so nothing tells what attention takes
    assert max(np.abs(fold.errors).max() for fold in folds if fold.left_out != 8) < 0.1


def test_the_catalogue_states_what_was_fitted() -> None:
    """With the figures of docs/benchmarks/published.md; a new fit that moves one by more than 5 % changes both."""
    logs = np.log([0.972, 1.03, 0.946, 0.318 / 0.3, 1.05, 0.97, 1.65, 0.0391 / 0.02, 0.212 / 0.15, 0.669 / 0.7])
    stated = catalogue_figures(logs)
    for name in ("a100_80gb", "h100_80gb"):
        run: Run = next(r for r in RUNS if r.gpu == name)
        device, network = run.cluster.device, run.cluster.network
        chip = device.name.partition("-")[0]
        for what in ("matmul_efficiency", "attention_efficiency"):
            assert getattr(device, what) == pytest.approx(stated[f"{chip} {what}"], rel=0.05)
        for what in ("matmul_traffic", "speed_spread", "busy_fraction"):
            assert getattr(device, what) == pytest.approx(stated[what], rel=0.05)
        assert network.bytes_per_second == pytest.approx(run.network_bytes_per_second * stated["network"], rel=0.05)


def test_errors_are_summed_up() -> None:
    found = summary("all", [-0.1, 0.02, 0.04])
    assert (found["count"], found["median %"], found["worst %"], found["middle %"]) == (3, 4.0, 10.0, 2.0)
