"""Trains architectures of the survey on two real ranks, under plans that mix modes, slices and recompute.

    python -m benchmarks.survey.on_ranks --models 25

Each rank has a batch of its own; a single process takes the mean of both losses. Losses and gradients of the second
step, after a step of the optimizer, must be equal to 1e-5 of the largest gradient of the parameter, or of a hundredth
of the model's largest. One line of JSON a model; exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import warnings
from datetime import timedelta
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import osdp
from benchmarks.survey.architectures import KINDS, Architecture, architectures, candidates
from benchmarks.survey.examples import Example, examples
from benchmarks.survey.one import warm_up
from osdp.api import plan_units, uncalled_parameters
from osdp.cluster import Cluster
from osdp.cost.layout import Shape, Shapes
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.model.capture import capture
from osdp.planfile import Plan, unpriced_plan
from osdp.recompute import Recompute
from osdp.runtime.split import SplitOperator
from osdp.sharding import FREE, KEEP, REPLICATE

RANKS, STEPS, TOLERANCE = 2, 2, 1e-5


def mixed_plan(model: nn.Module, example: Example) -> Plan:
    """Modes, slices and recompute go round over the units and blocks."""
    graph = capture(model, example, compute_dtype="fp32")
    shapes, again = Shapes(graph), cycle((True, False))
    grain = cycle((WHOLE, OPERATORS))
    chosen = []
    for index, stage in enumerate(graph.stages):
        known = {shape.granularity for shape in shapes.of(index)}
        wanted = next(grain) if stage.is_block else WHOLE
        wanted = wanted if wanted in known else next(iter(known))
        how = Recompute.FULL if not stage.is_block or next(again) else Recompute.NONE
        chosen.append(Shape(wanted, how if Shape(wanted, how) in shapes.of(index) else Recompute.NONE))
    layout = shapes.layout(chosen)
    modes, slices = cycle((FREE, REPLICATE, KEEP)), cycle(((2, 1), (1, 1), (3, 3)))
    options = []
    for unit in layout.units:
        mode, (splits, sharded) = next(modes), next(slices)
        able = unit.split_dim >= 0 and len(unit.modules) == 1
        options.append(Option(mode, splits, sharded) if able else Option(mode))
    return unpriced_plan(
        graph.name,
        plan_units(layout, options),
        Cluster.of("CPU", devices_per_node=RANKS),
        precision="fp32",
        reduce_dtype="fp32",
        optimizer="sgd",
        batch_size=2,
        uncalled=uncalled_parameters(graph, layout),
    )


def trainable(architecture: Architecture) -> tuple[nn.Module, list[Example]] | None:
    """The first small model that trains, with an example for each rank: equal on every process."""
    torch.manual_seed(0)
    for model in candidates(architecture):
        for index, example in enumerate(examples(architecture.kind, model)):
            try:
                model(**example).loss.backward()
            except Exception:
                continue
            model.zero_grad()
            return model, [_example(architecture, model, index, seed=rank) for rank in range(RANKS)]
    return None


def _example(architecture: Architecture, model: nn.Module, index: int, seed: int) -> Example:
    torch.manual_seed(seed)
    return list(examples(architecture.kind, model))[index]


def train(model: nn.Module, own: list[tuple[int, Example]]) -> list[float]:
    """Losses of each step, the mean over `own` examples; the gradients of the last stay."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank, example in own:
            torch.manual_seed(100 * step + rank)
            loss = model(**example).loss / len(own)
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step < STEPS - 1:
            optimizer.step()
    return losses


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by the plain model's names: shards gathered, slices joined."""
    found: dict[str, Tensor | None] = {}
    parts: dict[str, tuple[list[Tensor], int]] = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        owner, _, key = name.rpartition(".")
        operator = owner.rpartition(".slices.")[0]
        split = model.get_submodule(operator) if operator else None
        if isinstance(split, SplitOperator):
            dim = split.weight_dim if parameter.ndim > 1 else 0
            parts.setdefault(f"{operator}.{key}", ([], dim))[0].append(whole)
        else:
            found[name] = whole
    for name, (tensors, dim) in parts.items():
        found[name] = None if tensors[0] is None else torch.cat(tensors, dim)
    return found


def _rank(rank: int, store: str, architecture: Architecture, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send(_compared(rank, store, architecture))
    except BaseException as error:
        pipe.send({"why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def _compared(rank: int, store: str, architecture: Architecture) -> dict[str, Any]:
    found = trainable(architecture)
    if found is None:
        return {"why": "does not train in a plain process"}
    alone, own = found
    plan = mixed_plan(alone, own[0])
    losses = train(alone, list(enumerate(own)))
    truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
    again = trainable(architecture)
    assert again is not None
    wait = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=wait)
    model = osdp.parallelize(again[0], plan)
    mean = torch.tensor(train(model, [(rank, own[rank])]))
    gradients = whole_gradients(model)
    dist.all_reduce(mean)
    dist.barrier()
    largest = max(float(gradient.abs().max()) for gradient in truth.values() if gradient is not None)
    errors = {}
    for name, true in truth.items():
        given = gradients.get(name)
        if true is None or given is None:
            one = true if given is None else given
            errors[name] = 0.0 if one is None or not one.any() else 1.0
        else:
            scale = max(float(true.abs().max()), 1e-2 * largest)
            errors[name] = float((given - true).abs().max()) / scale
    worst = max(errors, key=lambda name: errors[name])
    loss_error = max(abs(a / RANKS - b) / abs(b) for a, b in zip(mean.tolist(), losses, strict=True))
    return {"units": len(plan.units), "loss_error": loss_error, "gradient_error": errors[worst], "worst": worst}


def compared(architecture: Architecture, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=_rank, args=(rank, f"{folder}/store", architecture, pipes[rank][1]), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        answers = [pipe.recv() if pipe.poll(seconds) else {"why": f"over {seconds:g} s"} for pipe, _ in pipes]
        for process in ranks:
            process.kill()
            process.join()
    return {"name": architecture.name, "kind": architecture.kind, **answers[1], **answers[0]}


def sample(count: int) -> list[Architecture]:
    """Architectures of every kind in turn, spread over the alphabet."""
    by_kind = [architectures([kind]) for kind in KINDS]
    each = -(-count // len(by_kind))
    spread = [[found[i * len(found) // each] for i in range(min(each, len(found)))] for found in by_kind]
    turns = [kind[place] for place in range(each) for kind in spread if place < len(kind)]
    return turns[:count]


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["name"]: row for row in rows if row["equal"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=25, help="how many (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for each (%(default)s)")
    parser.add_argument("--only", default="", help="architectures whose name has this in it, several with commas")
    parser.add_argument(
        "--out", type=Path, help="a file of one JSON line for each; what is equal in it is not run again"
    )
    options = parser.parse_args()
    warm_up()
    wanted = [part for part in options.only.split(",") if part]
    known = _known(options.out)
    rows = []
    for architecture in sample(options.models):
        if wanted and not any(part in architecture.name for part in wanted):
            continue
        row = known.get(architecture.name) or compared(architecture, options.seconds)
        row["equal"] = max(row.get("loss_error", 1.0), row.get("gradient_error", 1.0)) <= TOLERANCE
        rows.append(row)
        known[architecture.name] = row
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(each) + "\n" for each in known.values()))
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {len(rows)} train on {RANKS} ranks as in one process (to {TOLERANCE:g})")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
