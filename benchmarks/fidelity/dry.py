"""The dry run's peak of every case: the real engine on fake tensors, in one process."""

from __future__ import annotations

import sys
from typing import Any

from osdp.planfile import Plan
from osdp.verify import verify

from .models import captured, source_of


def with_dry_runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(cases, start=1):
        print(f"dry run {number} of {len(cases)}", file=sys.stderr, end="\r", flush=True)
        source = source_of(case["model"])
        plan = Plan.from_dict(case["plan"])
        verified = verify(plan, captured(source), build=source.build, inputs=source.inputs, loss=source.loss)
        found.append(
            {**case, "dry_peak_bytes": verified.measured_peak_bytes, "collectives": verified.collectives_match}
        )
    print(file=sys.stderr)
    return found
