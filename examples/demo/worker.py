"""One rank: trains the same model with stock FSDP2 and under two plans, a few steps of each in turn.

torchrun --nproc-per-node 4 -m examples.demo.worker --fsdp build/demo/fsdp.json --plan build/demo/plan.json \\
    --output build/demo/result.json

[Note: In turn]
All ways live in the same processes and take turns, round by round, so that whatever else the machine does meets all of
them. Each has its own model, begun with the same weights, and sees the same samples in the same steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import osdp
from osdp.errors import OsdpError
from osdp.model.selective import checkpointed
from osdp.model.source import ModelSource, load_model
from osdp.planfile import Plan
from osdp.profiling.trial import peak_above_start
from osdp.runtime.local import local_tensor
from osdp.training.batches import Feed, feed_of
from osdp.training.data import Order, Windows, demo_text, open_tokens
from osdp.training.failures import explained
from osdp.training.optimizer import Schedule, make_optimizer
from osdp.training.world import World, started

FSDP2, FSDP, PLAN = "plain FSDP2", "FSDP, by osdp", "the plan"
SCHEDULE = Schedule(lr=5e-4, warmup_steps=10, decay_steps=100)
SEED, CLIP = 0, 1.0
FIRST_LOSS_WITHIN = 1e-4
TIMEOUT_SECONDS = 120.0


class Text:
    """The book that comes with osdp: the samples of a step are the same for every way."""

    def __init__(self, feed: Feed, world: World) -> None:
        self.feed, self.world = feed, world
        self.windows = Windows((open_tokens(demo_text()),), feed.seq_len + 1)
        self.order = Order(len(self.windows), SEED)

    def micro_batch(self, step: int, micro: int, *, batch: int, accumulation: int) -> Tensor:
        ranks, rank = self.world.size, self.world.rank
        numbers = self.order.of_rank(step, micro, rank=rank, ranks=ranks, batch=batch, accumulation=accumulation)
        return torch.from_numpy(self.windows.batch(numbers, vocab=self.feed.vocab))


class Way:
    """A model that trains on this rank in one way."""

    def __init__(self, source: ModelSource, text: Text, model: nn.Module, *, batch: int, accumulation: int) -> None:
        self.source, self.text, self.model = source, text, model
        self.batch, self.accumulation = batch, accumulation
        self.optimizer = make_optimizer(model, "adamw", lr=SCHEDULE.lr, weight_decay=0.0)
        self.done = 0
        self.inputs: list[Tensor] = []

    def step(self) -> float:
        """Trains one step; the mean loss of this rank."""
        sizes = {"batch": self.batch, "accumulation": self.accumulation}
        self.inputs = [self.text.micro_batch(self.done, micro, **sizes) for micro in range(self.accumulation)]
        for group in self.optimizer.param_groups:
            group["lr"] = SCHEDULE.at(self.done)
        losses = []
        for windows in self.micro_batches(self.inputs):
            args, kwargs = self.text.feed.arguments(windows)
            loss = self.source.loss(self.model(*args, **kwargs)) / self.accumulation
            loss.backward()
            losses.append(loss.item())
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return sum(losses)

    def micro_batches(self, windows: list[Tensor]) -> Iterable[Tensor]:
        raise NotImplementedError

    def clip(self) -> None:
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Of one more step: what lasts from step to step, and what the allocator adds to it."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        lasting = [*self.model.parameters(), *self.model.buffers(), *states, *self.inputs]
        storages = {s.data_ptr(): s.nbytes() for s in (local_tensor(t).untyped_storage() for t in lasting)}
        return sum(storages.values()) + peak_above_start(self.step)


class Plain(Way):
    """Stock FSDP2 on every block and the rest, with the micro-batches and the recompute of the best plan like it."""

    def __init__(self, source: ModelSource, text: Text, best: Plan) -> None:
        recomputed = {unit.block: unit.recompute for unit in best.units if unit.recompute}
        model = osdp.initialize(source.build_on_meta(), seed=SEED)
        for name, block in model.get_submodule("blocks").named_children():
            if f"blocks.{name}" in recomputed:
                block.forward = checkpointed(block.forward, recomputed[f"blocks.{name}"])
            fully_shard(block)
        fully_shard(model)
        super().__init__(source, text, model, batch=best.batch_size, accumulation=best.accumulation)

    def micro_batches(self, windows: list[Tensor]) -> Iterable[Tensor]:
        assert isinstance(self.model, FSDPModule)
        for micro, batch in enumerate(windows):
            self.model.set_requires_gradient_sync(micro + 1 == len(windows))
            yield batch

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


class Planned(Way):
    """A plan, on osdp's runtime."""

    def __init__(self, source: ModelSource, text: Text, plan: Plan) -> None:
        model = osdp.parallelize(source.build_on_meta(), plan)
        osdp.initialize(model, seed=SEED)
        super().__init__(source, text, model, batch=plan.batch_size, accumulation=plan.accumulation)

    def micro_batches(self, windows: list[Tensor]) -> Iterable[Tensor]:
        return osdp.accumulate(self.model, windows)

    def clip(self) -> None:
        osdp.clip_grad_norm_(self.model.parameters(), CLIP)


def compared(
    ways: dict[str, Way], world: World, *, rounds: int, steps: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Losses of every step, seconds of a step by round on the slowest rank, and the highest rank's peak."""
    losses: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:  # neither is always the one after the other
            dist.barrier()
            began = perf_counter()
            own = [ways[name].step() for _ in range(steps)]
            dist.barrier()
            numbers = world.all_numbers((perf_counter() - began) / steps, *own)
            taken, *each = zip(*numbers, strict=True)
            seconds[name].append(max(taken))
            losses[name] += [sum(step) / world.size for step in each]
        if number == 0:
            _require_equal({name: found[0] for name, found in losses.items()})
        now = "; ".join(f"{name} {found[-1]:.2f} s" for name, found in seconds.items())
        say(f"step {(number + 1) * steps} of {rounds * steps}, loss {losses[name][-1]:.3f}: {now}")
    found = {}
    for name, way in ways.items():
        dist.barrier()
        peak = max(peak for (peak,) in world.all_numbers(way.peak_bytes()))
        found[name] = {"losses": losses[name], "round_seconds": seconds[name], "peak_bytes": int(peak)}
    return found


def _require_equal(first: dict[str, float]) -> None:
    if max(first.values()) - min(first.values()) > FIRST_LOSS_WITHIN:
        raise OsdpError(f"the first losses differ, though the weights and the samples are equal: {first}")


def trained(args: argparse.Namespace, world: World) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    # FSDP2 says that outputs which are views must not be changed in place; nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    fsdp, plan, source = Plan.load(args.fsdp), Plan.load(args.plan), load_model(args.model)
    text = Text(feed_of(source, source.build_on_meta()), world)
    ways: dict[str, Way] = {
        FSDP2: Plain(source, text, fsdp),
        FSDP: Planned(source, text, fsdp),
        PLAN: Planned(source, text, plan),
    }
    return compared(
        ways,
        world,
        rounds=args.rounds,
        steps=args.steps,
        say=lambda line: print(line, file=sys.stderr, flush=True) if world.leads else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples.demo.model:build")
    parser.add_argument("--fsdp", type=Path, required=True, help="a plan that frees every block, as FSDP does")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    args = parser.parse_args()
    with started(timeout_seconds=TIMEOUT_SECONDS) as world:
        try:
            found = trained(args, world)
        except BaseException as error:
            known = error if isinstance(error, OsdpError) else None
            known = known or explained(error, during="training", plan=None, resumes="start again")
            if known is None:
                raise
            if world.speaks_first():
                print(f"rank {world.rank}: {known}", file=sys.stderr, flush=True)
            return 1
        if world.leads:
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
