"""Trains architectures of the survey on two real ranks, under plans that mix modes, slices and recompute.

    python -m benchmarks.survey.on_ranks --models 25

Each rank has a batch of its own; a single process takes the mean of both losses. Losses and gradients of the second
step, after a step of the optimizer, must be equal to 1e-5 of the largest gradient of the parameter, or of a hundredth
of the model's largest. A model that does not train by itself, or whose own gradients differ by more where its weights
are one rounding off (a batch norm over two values), gives way to the next. One line of JSON a model; exit code 1 where
one differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import osdp
from benchmarks.survey.architectures import KINDS, Architecture, architectures, candidates
from benchmarks.survey.examples import Example, examples
from benchmarks.survey.one import warm_up
from osdp.answer import plan_units, uncalled_parameters
from osdp.cluster import Cluster
from osdp.cost.layout import Variant, Variants
from osdp.cost.units import OPERATORS, WHOLE, Option, Unit
from osdp.model.capture import capture
from osdp.model.fake import without_layerdrop
from osdp.planfile import Plan, unpriced_plan
from osdp.recompute import Recompute
from osdp.runtime.split import SplitOperator
from osdp.sharding import FREE, KEEP, REPLICATE, ShardingMode

RANKS, STEPS, TOLERANCE = 2, 2, 1e-5
Gradients = dict[str, Tensor | None]
NOT_TRAINED = "does not train in a plain process"
UNSTABLE = "its own gradients change by more than the tolerance where weights change by one rounding"
SKIPPED = (NOT_TRAINED, UNSTABLE)


def mixed_plan(model: nn.Module, example: Example) -> Plan:
    """Modes, slices and recompute go round over the units and blocks."""
    graph = capture(model, example, compute_dtype="fp32")
    variants, again = Variants(graph), cycle((True, False))
    grain = cycle((WHOLE, OPERATORS))
    chosen = []
    for index, stage in enumerate(graph.stages):
        known = {variant.granularity for variant in variants.of(index)}
        wanted = next(grain) if stage.is_block else WHOLE
        wanted = wanted if wanted in known else next(iter(known))
        how = Recompute.FULL if not stage.is_block or next(again) else Recompute.NONE
        chosen.append(Variant(wanted, how if Variant(wanted, how) in variants.of(index) else Recompute.NONE))
    layout = variants.layout(chosen)
    modes, slices = cycle((FREE, REPLICATE, KEEP)), cycle(((2, 1), (1, 1), (3, 3)))
    options = []
    for unit in layout.units:
        options.append(_option(unit, next(modes), *next(slices)))
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


def _option(unit: Unit, mode: ShardingMode, slices: int, sharded: int) -> Option:
    """The mode, in so many slices where the unit can be cut into these."""
    if unit.split_dim < 0 or len(unit.modules) > 1:
        return Option(mode)
    most = min(p.shape[unit.split_dim] for p in unit.parameters if len(p.shape) > 1)
    return Option(mode, min(slices, most), min(sharded, most))


def trainable(architecture: Architecture) -> tuple[nn.Module, list[Example]] | None:
    """The first small model that trains, with an example for each rank: equal on every process."""
    torch.manual_seed(0)
    for model in candidates(architecture):
        without_layerdrop(model)  # under FSDP transformers runs a dropped layer all the same, and so draws more numbers
        for index, example in enumerate(examples(architecture.kind, model)):
            try:
                model(**example).loss.backward()
            except Exception:
                continue
            model.zero_grad()
            return model, [_example(architecture, model, index, seed=rank) for rank in range(RANKS)]
    return None


def _example(architecture: Architecture, model: nn.Module, index: int, seed: int) -> Example:
    return list(examples(architecture.kind, model, seed))[index]


def train(model: nn.Module, own: list[tuple[int, Example]]) -> list[float]:
    """Losses of each step, the mean over `own` examples; the gradients of the last stay."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank, example in own:
            _seed(100 * step + rank)
            loss = model(**example).loss / len(own)
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step < STEPS - 1:
            optimizer.step()
    return losses


def _seed(seed: int) -> None:
    """Of torch, NumPy and Python: masks of audio are drawn by NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def whole_gradients(model: nn.Module) -> Gradients:
    """Gradients by the plain model's names: shards gathered, slices joined."""
    found: Gradients = {}
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
        if os.environ.get("SURVEY_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        pipe.send({"why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def _compared(rank: int, store: str, architecture: Architecture) -> dict[str, Any]:
    found = trainable(architecture)
    if found is None:
        return {"why": NOT_TRAINED}
    alone, own = found
    plan = mixed_plan(alone, own[0])
    losses = train(alone, list(enumerate(own)))
    truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
    if _gradient_errors(_nudged(architecture, own), truth)[0] > TOLERANCE:
        return {"why": UNSTABLE}
    again = trainable(architecture)
    assert again is not None
    wait = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=wait)
    model = osdp.parallelize(again[0], plan)
    mean = torch.tensor(train(model, [(rank, own[rank])]))
    gradients = whole_gradients(model)
    dist.all_reduce(mean)
    dist.barrier()
    gradient_error, worst = _gradient_errors(gradients, truth)
    loss_error = max(abs(a / RANKS - b) / abs(b) for a, b in zip(mean.tolist(), losses, strict=True))
    return {"units": len(plan.units), "loss_error": loss_error, "gradient_error": gradient_error, "worst": worst}


def _nudged(architecture: Architecture, own: list[Example]) -> Gradients:
    """The gradients of a single process whose weights are one rounding off: how far summation order may lead."""
    found = trainable(architecture)
    assert found is not None
    model = found[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-23)
    train(model, list(enumerate(own)))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _gradient_errors(gradients: Gradients, truth: Gradients) -> tuple[float, str]:
    """The largest difference, as the module's text says, and where it is."""
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
    return errors[worst], worst


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


def sample(count: int) -> list[list[Architecture]]:
    """Architectures of every kind in turn, spread over the alphabet; for each, those after it that may stand in."""
    by_kind = [architectures([kind]) for kind in KINDS]
    each = -(-count // len(by_kind))
    starts = [[place * len(found) // each for place in range(each + 1)] for found in by_kind]
    turns = [
        found[places[turn] : places[turn + 1]]
        for turn in range(each)
        for found, places in zip(by_kind, starts, strict=True)
    ]
    return [stand_ins for stand_ins in turns if stand_ins][:count]


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["name"]: row for row in rows if row["equal"] or row.get("why") in SKIPPED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=25, help="how many (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for each (%(default)s)")
    parser.add_argument("--only", default="", help="architectures whose name has this in it, several with commas")
    parser.add_argument(
        "--out", type=Path, help="a file of one JSON line for each; those in it that are equal are not run again"
    )
    options = parser.parse_args()
    warm_up()
    wanted = [part for part in options.only.split(",") if part]
    known = _known(options.out)
    rows = []
    for stand_ins in sample(options.models):
        for architecture in stand_ins:
            if wanted and not any(part in architecture.name for part in wanted):
                continue
            row = known.get(architecture.name) or compared(architecture, options.seconds)
            row["equal"] = max(row.get("loss_error", 1.0), row.get("gradient_error", 1.0)) <= TOLERANCE
            known[architecture.name] = row
            if options.out:
                options.out.write_text("".join(json.dumps(each) + "\n" for each in known.values()))
            if row.get("why") not in SKIPPED:
                rows.append(row)
                print(json.dumps(row), flush=True)
                break
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {len(rows)} train on {RANKS} ranks as in one process (to {TOLERANCE:g})")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
