"""`osdp train`: trains a model as it is planned, on all ranks that torchrun starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.cli.failed import errors_said
from osdp.cli.parser import Commands, add_model, checked, positive, whole
from osdp.cli.plan import add_restrictions, asked_recompute, pins_of
from osdp.cli.planning import add_planning, check_batch
from osdp.cli.progress import shown_progress
from osdp.cost.training import PRECISIONS
from osdp.errors import UsageError
from osdp.plan_check import check_graph
from osdp.planfile import Plan

if TYPE_CHECKING:
    from torch import nn

    from osdp.model.source import ModelSource
    from osdp.training.loop import Settings
    from osdp.training.run import LogSettings, PlanOf
    from osdp.training.world import World

DESCRIPTION = """\
Train a model on text, as its plan says, on every rank that torchrun starts;
without torchrun, on one. Without --plan it is planned first, for the ranks that
run. The order of the data depends on the seed and the global batch alone, so
that a run can go on with other ranks."""

EXAMPLES = """\
examples:
  osdp train gpt-tiny --steps 50
  torchrun --nproc-per-node 4 -m osdp train gpt-tiny --data book.txt
  torchrun --nproc-per-node 8 -m osdp train llama3-8b --plan plan.json \\
    --data tokens.bin --checkpoint run1 --save-every 500 --async-save --resume
  torchrun --nproc-per-node 8 -m osdp train --config run.toml --lr 3e-4
  torchrun --nproc-per-node 2 --max-restarts 3 -m osdp train \\
    my_package.models:build --checkpoint run2 --save-every 100 --resume"""

GLOBAL_BATCH = 32  # a choice of training and not of the plan: the same on any number of ranks that divides it
PLANNING = {
    "cluster": "--cluster",
    "memory": "--memory",
    "seq_len": "--seq-len",
    "precision": "--precision",
    "reduce_dtype": "--reduce-dtype",
    "optimizer": "--optimizer",
    "batch": "--batch",
    "global_batch": "--global-batch",
    "pin": "--pin",
    "modes": "--modes",
    "no_split": "--no-split",
    "no_recompute": "--no-recompute",
    "recompute": "--recompute",
}


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "train", help="train a model as it is planned", description=DESCRIPTION, epilog=EXAMPLES
    )
    parser.reads_config = True
    add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file with options by their long names; the command line wins over it"
    )
    _add_data(parser)
    _add_training(parser)
    _add_checkpoints(parser)
    planning = add_planning(parser, global_batch=f"{GLOBAL_BATCH}, or the next multiple of the ranks")
    planning.add_argument("--plan", metavar="FILE", type=Path, help="a plan of `osdp plan -o`; nothing is planned then")
    add_restrictions(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="files of tokens (.npy, .bin), texts (.jsonl) or one text (any other) (default: a book that comes along)",
    )
    group.add_argument(
        "--tokenizer", metavar="FILE", type=Path, help="tokenizer.json for texts (default: a byte is a token)"
    )
    group.add_argument(
        "--token-dtype", choices=("uint16", "uint32"), default="uint16", help="of .bin files (default: %(default)s)"
    )
    group.add_argument(
        "--validation", metavar="PART", type=fraction, default=0.0, help="part of the data to hold back, such as 0.1"
    )
    group.add_argument(
        "--validate-every", metavar="N", type=positive, default=0, help="steps between (default: at the end only)"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", metavar="N", type=positive, default=100, help="default: %(default)s")
    group.add_argument(
        "--lr", metavar="RATE", type=number, default=1e-3, help="the highest rate (default: %(default)s)"
    )
    group.add_argument(
        "--warmup", metavar="N", type=positive, help="steps up to the highest rate (default: a tenth, at most 100)"
    )
    group.add_argument(
        "--decay-steps", metavar="N", type=positive, help="where the cosine has fallen to a tenth (default: --steps)"
    )
    group.add_argument(
        "--weight-decay", metavar="D", type=number, default=0.1, help="of matrices (default: %(default)s)"
    )
    group.add_argument(
        "--clip", metavar="NORM", type=number, default=1.0, help="gradients' norm; 0: none (default: %(default)s)"
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=whole(-(1 << 63), (1 << 63) - 1),
        default=0,
        help="of weights and order (default: %(default)s)",
    )
    group.add_argument(
        "--timeout", metavar="SECONDS", type=positive, default=300, help="for a micro-batch or a save (default: 300)"
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--checkpoint", metavar="DIR", type=Path, help="where to save, at the end and when interrupted")
    group.add_argument("--save-every", metavar="N", type=positive, default=0, help="save every N steps too")
    group.add_argument("--async-save", action="store_true", help="train on while a checkpoint is written")
    group.add_argument("--keep", metavar="N", type=positive, default=2, help="checkpoints (default: %(default)s)")
    group.add_argument("--resume", action="store_true", help="go on from the newest in DIR, if there is one")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document a line: start, every step, end")
    group.add_argument("--log-every", metavar="N", type=positive, default=1, help="steps a line (default: %(default)s)")
    group.add_argument("--tensorboard", metavar="DIR", type=Path, help="write curves there for TensorBoard")
    group.add_argument("--wandb", metavar="PROJECT", help="log curves to a run of that project of Weights & Biases")
    group.add_argument(
        "--trace",
        metavar="DIR",
        type=Path,
        help="write one step as measured on rank 0, and as predicted, for Perfetto and memory_viz",
    )
    group.add_argument("--quiet", action="store_true", help="show no progress")


_MOST = 1e9


@checked
def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number; give one such as 3e-4") from None
    if not 0 <= value <= _MOST:
        raise UsageError(f"{text[:40]} is not a number from 0 to {_MOST:g}; give one such as 3e-4")
    return value


@checked
def fraction(text: str) -> float:
    value = number(text)
    if value >= 1:
        raise UsageError(f"{text} is not a part of the data; give one below 1, such as 0.1")
    return value


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    # A lost rank is told in a sentence; without this, the library tells it first, with its stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    plan = Plan.load(arguments.plan) if arguments.plan else None
    from osdp.model.source import load_model

    seq_len = plan.model.seq_len if plan is not None and ":" not in arguments.model else arguments.seq_len
    source = load_model(arguments.model, seq_len=seq_len)
    if plan is not None and plan.model.uncalled:
        # Only a trace tells what is called; where a plan holds every parameter in a unit, none is needed.
        compute_dtype, device = PRECISIONS[plan.precision].compute_dtype, plan.cluster.device
        check_graph(plan, source.capture(compute_dtype, device=device, name=plan.model.name))
    from osdp.training.data import demo_text
    from osdp.training.failures import StopRequest
    from osdp.training.run import Files, train

    with StopRequest() as wish, errors_said():
        code = train(
            source,
            Files(tuple(arguments.data or [demo_text()]), arguments.tokenizer, arguments.token_dtype),
            _settings(arguments),
            _log_settings(arguments),
            plan_of=_planner(arguments, source, plan),
            timeout_seconds=arguments.timeout,
            wish=wish,
        )
    if code:
        raise SystemExit(code)


def _log_settings(arguments: argparse.Namespace) -> LogSettings:
    from osdp.training.curves import CurveTargets
    from osdp.training.run import LogSettings

    targets = CurveTargets(arguments.tensorboard, arguments.wandb)
    return LogSettings(arguments.json, arguments.quiet, arguments.log_every, targets, arguments.trace)


def _check(arguments: argparse.Namespace) -> None:
    given = [option for name, option in PLANNING.items() if getattr(arguments, name)]
    if arguments.plan and given:
        raise UsageError(f"--plan {arguments.plan} has settled {', '.join(given)}; leave one of the two out")
    check_batch(arguments)
    if arguments.trace is not None:
        try:
            arguments.trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--trace {arguments.trace} cannot be a folder ({error.strerror}); give another") from None
    for option in ("resume", "save_every", "async_save"):
        if getattr(arguments, option) and arguments.checkpoint is None:
            raise UsageError(f"--{option.replace('_', '-')} needs a folder; give it with --checkpoint DIR")


def _settings(arguments: argparse.Namespace) -> Settings:
    from osdp.training.checkpointing import CheckpointSettings
    from osdp.training.loop import Settings
    from osdp.training.optimizer import Schedule

    decay_steps = arguments.decay_steps or arguments.steps
    warmup = arguments.warmup or max(1, min(100, decay_steps // 10))
    return Settings(
        steps=arguments.steps,
        schedule=Schedule(arguments.lr, warmup, decay_steps),
        weight_decay=arguments.weight_decay,
        clip=arguments.clip,
        seed=arguments.seed,
        validation=arguments.validation,
        validate_every=arguments.validate_every,
        keeping=CheckpointSettings(
            arguments.checkpoint, arguments.save_every, arguments.keep, arguments.resume, arguments.async_save
        ),
    )


def _planner(arguments: argparse.Namespace, source: ModelSource, given: Plan | None) -> PlanOf:
    pins = pins_of(arguments.pin or ())

    def plan_of(world: World, model: nn.Module) -> Plan:
        if given is not None:
            return given
        from osdp.api import plan
        from osdp.training.run import this_cluster

        cluster = arguments.cluster or this_cluster(world, memory_bytes=arguments.memory)
        if cluster.world_size != world.size:
            raise UsageError(
                f"--cluster {cluster.label} has {cluster.world_size} devices but {world.size} ranks run; start as many"
            )
        with shown_progress(arguments.quiet or not world.leads) as progress:
            return plan(
                model,
                source.inputs,
                cluster,
                memory=arguments.memory,
                precision=arguments.precision or ("fp32" if world.device.type == "cpu" else "bf16"),
                optimizer=arguments.optimizer or "adamw",
                reduce_dtype=arguments.reduce_dtype,
                pin=pins or None,
                modes=arguments.modes,
                split=not arguments.no_split,
                recompute=asked_recompute(arguments),
                loss=source.loss,
                name=arguments.model,
                seq_len=source.seq_len,
                progress=progress,
                **_batch(arguments, world),
            )

    return plan_of


def _batch(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    if arguments.batch:
        return {"batch": arguments.batch}
    return {"global_batch": arguments.global_batch or -(-GLOBAL_BATCH // world.size) * world.size}
