"""What it takes to learn a model before the search: imports, building, one fake step, the capture, the whole command.

    python benchmarks/bench_capture.py                 # real-size models and presets
    python benchmarks/bench_capture.py --only Qwen3-8B --no-command

Each model in a process of its own. Targets: a capture takes at most 3 times one forward and backward of the model on
fake tensors, by the clock; the whole plan command takes at most 10 s. A capture uses a second process where there is a
second core, so the processor seconds of both stand beside the seconds by the clock.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from common import Row, deliver, met, parser, timed
from real_sizes import CLUSTER, CLUSTERS, CONFIGS

OSDP = str(Path(sys.executable).parent / "osdp")
PRESETS = ("gpt-tiny", "gpt-small-27m", "gpt2-xl", "gpt3-175b")
MOST_TIMES, MOST_SECONDS = 3.0, 10.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="models whose name has this in it, several with commas")
    arguments.add_argument("--no-command", action="store_true", help="captures only")
    arguments.add_argument("--worker", nargs=2, metavar=("MODEL", "CLUSTER"), help="measure one; used by itself")
    given = arguments.parse_args()
    if given.worker:
        print(json.dumps(measured(*given.worker)))
        return
    wanted = [part for part in given.only.split(",") if part]
    captures, commands = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in (*CONFIGS, *PRESETS):
            if wanted and not any(part in name for part in wanted):
                continue
            model = name
            if name in CONFIGS:
                model = str(Path(folder) / f"{name}.json")
                Path(model).write_text(json.dumps(CONFIGS[name]))
            cluster = CLUSTERS.get(name, CLUSTER)
            worker = [sys.executable, __file__, "--worker", model, cluster]
            row = json.loads(subprocess.run(worker, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(f"{name}: captured in {row['capture s']:.2f} s", file=sys.stderr)
            captures.append({"model": name, **row, "target": met(row["times"], MOST_TIMES)})
            if not given.no_command and name in CONFIGS:
                commands.append({"model": name, "cluster": cluster, **command(model, cluster)})
    tables = {f"Capture, at most {MOST_TIMES:g} times a fake step": captures}
    if commands:
        tables[f"osdp plan, at most {MOST_SECONDS:g} s"] = commands
    deliver(tables, as_json=given.json)


def measured(spec: str, cluster: str) -> Row:
    """The seconds of every step up to the search, in this process, which has imported nothing yet."""
    began = perf_counter()
    import torch

    from osdp.cluster import Cluster
    from osdp.model.source import load_model

    torch.set_num_threads(1)
    source = load_model(spec)
    imported = perf_counter() - began
    model, build_seconds = timed(source.build_on_meta)
    from osdp.model.capture import capture

    device = Cluster.parse(cluster).device
    before = os.times()
    graph, capture_seconds = timed(lambda: capture(model, source.inputs, loss=source.loss, device=device))
    after = os.times()
    step_seconds = min(fake_step_seconds(source, model) for _ in range(2))
    return {
        "parameters": graph.num_parameters,
        "blocks": len(graph.blocks),
        "import s": imported,
        "build s": build_seconds,
        "fake step s": step_seconds,
        "capture s": capture_seconds,
        "capture CPU s": sum(after[:4]) - sum(before[:4]),
        "times": capture_seconds / step_seconds,
    }


def fake_step_seconds(source: Any, model: Any) -> float:
    """One forward and backward at batch 4 on fake tensors, and nothing else; making the fake model is no part of it."""
    from osdp._torch import FakeTensorMode
    from osdp.model.fake import DTYPES, fake_copy, sequences_not_packed
    from osdp.model.inputs import map_tensors
    from osdp.model.values import Values, fake_of

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = fake_copy(model, DTYPES["bf16"])
    with mode, Values(4):
        args, kwargs = map_tensors(fake_of, source.inputs(4))
        began = perf_counter()
        with sequences_not_packed(kwargs):
            source.loss(fake(*args, **kwargs)).backward()
        return perf_counter() - began


def command(model: str, cluster: str) -> Row:
    began, before = perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = [OSDP, "plan", model, "--cluster", cluster, "--json", "--quiet"]
    ran = subprocess.run(asked, check=False, capture_output=True, text=True)
    seconds = perf_counter() - began
    if ran.returncode:
        said = (ran.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"whole command s": seconds, "target": f"exit code {ran.returncode}: {said}"}
    certificate = json.loads(ran.stdout)["certificate"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "whole command s": seconds,
        "CPU s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "search s": certificate["seconds"],
        "before the search s": seconds - certificate["seconds"],
        "gap": certificate["gap"],
        "target": met(seconds, MOST_SECONDS),
    }


if __name__ == "__main__":
    main()
