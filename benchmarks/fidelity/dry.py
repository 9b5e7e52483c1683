"""What can be said of every case without its ranks: the dry run's peak and its collectives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.verify import verify

from .models import source_of


def dry_runs(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases with what their dry runs say."""
    found = []
    for number, case in enumerate(cases, start=1):
        print(f"dry run {number} of {len(cases)}", file=sys.stderr, end="\r", flush=True)
        source, plan = source_of(case["model"]), Plan.from_dict(case["plan"])
        graph = graph_of(case["model"])
        verified = verify(plan, graph, build=source.build, inputs=source.inputs, loss=source.loss)
        found.append(
            {
                **case,
                "dry_peak_bytes": verified.measured_peak_bytes,
                "collectives_match": verified.collectives_match,
            }
        )
    print(file=sys.stderr)
    return found


@cache
def graph_of(model: str) -> ModelGraph:
    return source_of(model).capture("fp32")
