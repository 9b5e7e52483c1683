"""A capture that will take long says how long, from two short forwards, and then how far it is."""

from __future__ import annotations

import logging
from itertools import count

import pytest
import torch
from many_models import WIDTH, Attention, Mamba, many, sequence
from torch import nn

from osdp._torch import FakeTensorMode
from osdp.model import pace
from osdp.model.inputs import scaled_inputs
from osdp.model.pace import KERNELS, Pace, depth_said, forwards_traced, waiting_said
from osdp.model.runs import BATCHES, Runner, _kernels_at, forward_kernels


def runner(kind: type[nn.Module], length: int, mode: FakeTensorMode) -> Runner:
    example = torch.randn(2, length, WIDTH), sequence()[1]
    inputs = scaled_inputs(example)
    return Runner.of(many(kind), inputs, None, "fp32", mode, root_is_operator=False, device=None)


@pytest.mark.parametrize("kind", [Mamba, Attention])
def test_two_short_forwards_tell_how_many_kernels_a_long_one_has(kind: type[nn.Module]) -> None:
    run = runner(kind, 80, FakeTensorMode(allow_non_fake_inputs=True))
    found = forward_kernels(lambda mode: runner(kind, 80, mode))
    assert found is not None
    assert found[1] == _kernels_at(run, run.inputs(BATCHES[0]))
    assert (found[1] > found[0]) == (kind is Mamba)


def test_inputs_without_a_length_tell_nothing() -> None:
    assert forward_kernels(lambda mode: runner(Mamba, 20, mode)) is None


def test_it_says_once_how_long_and_then_how_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = count(0.0, 2.0)  # two seconds for every look at it
    monkeypatch.setattr(pace, "monotonic", lambda: next(clock))
    asked = []

    def forward() -> tuple[int, int]:
        asked.append(True)
        return KERNELS, 10 * KERNELS

    following = Pace("a scan", forward, began=0.0)
    with caplog.at_level(logging.WARNING, logger="osdp"):
        for _ in range(20):
            following.tick()
    expected = forwards_traced() * 10
    said = [record.getMessage() for record in caplog.records]
    assert len(asked) == 1
    assert f"about {expected * KERNELS:,} kernels" in said[0]
    # at the third look, 4 seconds in, three of `expected` parts are done
    assert f"takes about {4 * (expected - 3) / 3 / 60:.0f} min more" in said[0]
    assert said[0].endswith("a shorter sequence takes less in proportion")
    assert len(said) == 4 and f"{100 * 8 / expected:.0f} % done" in said[1]


def test_a_short_capture_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = count(0.0, 2.0)
    monkeypatch.setattr(pace, "monotonic", lambda: next(clock))
    following = Pace("a deep model", lambda: (KERNELS // 4, KERNELS // 4), began=0.0)
    for _ in range(6):
        following.tick()
    assert not caplog.records


def test_a_check_that_takes_long_says_so(caplog: pytest.LogCaptureFixture) -> None:
    depth_said("a model", 0.1, 3, 2000)
    depth_said("a shallow model", 0.1, 3, 200)
    say = waiting_said("a model", "its 2000 blocks are checked")
    for seconds in (5.0, 11.0, 16.0, 130.0):
        say(seconds)
    assert [record.message for record in caplog.records] == [
        "osdp: capturing a model: 3 of its 2000 blocks are traced, and all are checked, which takes at most about 67 s",
        *(f"osdp: capturing a model: its 2000 blocks are checked, for {words} so far" for words in ("11 s", "2 min")),
    ]
