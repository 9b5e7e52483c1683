"""`osdp plan`: the fastest plan for a model on a cluster, and the proof."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from osdp.cli.output import print_json
from osdp.cli.parser import Commands, add_model, checked, memory_size, output_path, read_optimizer, samples, tokens
from osdp.cli.progress import shown_progress
from osdp.cluster import KERNELS, Cluster, format_bytes, parse_rate
from osdp.cost.training import OPTIMIZERS, PRECISIONS
from osdp.errors import DoesNotFit, UsageError
from osdp.planfile import PLAN_VERSION, Plan
from osdp.recompute import AUTO, WORDS, Recompute
from osdp.sharding import MODES

if TYPE_CHECKING:
    from osdp.model.source import ModelSource

DESCRIPTION = """\
Find the plan with the most samples per second that fits the memory, prove that
no plan is better, and compare it with DDP, ZeRO-2, FSDP and, on several nodes,
HSDP. Nothing is run: the model is traced on fake tensors."""

EXAMPLES = """\
modes, how a unit's parameters are sharded:
  replicate     whole on every rank; gradients are all-reduced (data parallel)
  keep          sharded over all ranks; gathered in forward, kept for backward
  free          sharded over all ranks; gathered for forward, freed, gathered
                again for backward (fully sharded, ZeRO-3)
  free_to_node  as free, but between the two each node holds one copy
  keep_in_node  as keep, but sharded in each node, replicated across nodes
  free_in_node  as free, but sharded in each node, replicated across nodes

examples:
  osdp plan gpt2-xl --cluster 8xRTX-3090
  osdp plan llama3-8b --cluster 2x8xA100-40GB --seq-len 4096 -o plan.json
  osdp plan llama3-8b --cluster 4x8xA100-80GB --network 200Gbit
  osdp plan gpt-48x2048 --cluster 8xA100-80GB --attention flash-1
  osdp plan gpt-48x2048 --cluster 8xRTX-TITAN --global-batch 256
  osdp plan llama3-70b --cluster 8xA100-40GB --host-memory 2TiB
  osdp plan ./my-model/config.json --cluster lab.toml --pin 'lm_head=keep'
  osdp plan my_package.models:build --cluster 4xL4 --modes replicate,free
  osdp plan llama3-70b --cluster 8x8xH100-80GB --global-batch 512 --tensor 4
  osdp plan gpt3-175b --cluster 128x8xH100-80GB --global-batch 2048 \\
      --layout auto"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan", help="find the fastest plan that fits", description=DESCRIPTION, epilog=EXAMPLES
    )
    add_model(parser)
    _add_machines(parser)
    _add_training(parser)
    add_restrictions(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines")
    group.add_argument(
        "--cluster",
        metavar="CLUSTER",
        required=True,
        type=checked(Cluster.parse),
        help="such as 2x8xA100-80GB (nodes x devices x device; see `osdp devices`), or a cluster file (.toml)",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory_size,
        help="memory of each device, such as 16GiB; a reserve is taken off (default: the device's own)",
    )
    group.add_argument(
        "--host-memory",
        metavar="SIZE",
        type=memory_size,
        help="memory of each node's host, such as 1TiB, for what is held there (default: a usual machine's)",
    )
    group.add_argument(
        "--offload",
        choices=(AUTO, "none"),
        default=AUTO,
        help="auto: hold units and inputs of recomputed blocks on the host where nothing fits otherwise; none: never "
        "(default: %(default)s)",
    )
    add_rates(group)
    group.add_argument(
        "--tensor", metavar="T", type=samples, default=1, help="ranks that share every operator (default: %(default)s)"
    )
    group.add_argument(
        "--pipeline", metavar="P", type=samples, default=1, help="stages that share the blocks (default: %(default)s)"
    )
    group.add_argument("--stage", metavar="S", type=int, help="plan this stage, from 0 (default: the slowest)")
    group.add_argument(
        "--interleave",
        metavar="V",
        type=samples,
        default=1,
        help="chunks of blocks of each stage, which take turns; planned, not run (default: %(default)s)",
    )
    group.add_argument(
        "--expert",
        metavar="E",
        type=samples,
        default=1,
        help="ranks that share the experts, each with samples of its own (default: %(default)s)",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="each tensor-parallel rank has a part of the tokens between the operators that they share",
    )
    group.add_argument(
        "--layout", choices=("auto",), help="try all degrees of --tensor and --pipeline, and take the fastest"
    )


def add_rates(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--network",
        metavar="RATE",
        type=checked(parse_rate),
        help="of each node and direction, such as 200Gbit or 25GB/s (default: the device's usual network)",
    )
    group.add_argument(
        "--attention",
        metavar="KERNEL",
        choices=tuple(KERNELS),
        help="attention kernel that runs: flash-1 (software of 2023), flash-2, flash-3, cudnn, efficient, or either of "
        "the first two (default: the device's usual one, flash-2 on most; rates: `osdp devices --json`)",
    )
    group.add_argument(
        "--expandable-segments",
        action="store_true",
        help="torch's allocator is set to use them (PYTORCH_CUDA_ALLOC_CONF): half as many fragments are reserved",
    )


def with_rates(arguments: argparse.Namespace) -> Cluster:
    """The cluster with the network, the attention kernel and the allocator that were asked for."""
    cluster: Cluster = arguments.cluster
    if arguments.expandable_segments:
        cluster = replace(cluster, expandable_segments=True)
    if arguments.network is not None:
        cluster = cluster.with_network(arguments.network)
    return cluster if arguments.attention is None else cluster.with_attention(arguments.attention)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--seq-len", metavar="S", type=tokens, help="tokens in a sample (default: the model's own)")
    group.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        default="bf16",
        help="bf16 and fp16: computes in that, stores fp32 (fp16 with a gradient scaler, for V100, T4 and older);"
        " fp32; pure-bf16: all in bf16 (default: %(default)s)",
    )
    group.add_argument(
        "--reduce-dtype",
        choices=("fp32", "bf16"),
        help="gradients on the wire (default: fp32, with pure-bf16 bf16)",
    )
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        type=read_optimizer,
        default="adamw",
        help=f"its states count: {', '.join(OPTIMIZERS)} (default: %(default)s)",
    )
    group.add_argument(
        "--compiled", action="store_true", help="run each block as torch.compile makes it; a block is one unit then"
    )
    group.add_argument(
        "--loss-chunks",
        metavar="N",
        type=chunks,
        default=1,
        help="compute a language head's loss in N chunks, without its whole logits; auto: in 8 where that is faster"
        " (default: %(default)s)",
    )
    group.add_argument(
        "--batch", metavar="B", type=samples, help="samples of one device at a time (default: the best that fits)"
    )
    group.add_argument(
        "--accumulation", metavar="A", type=samples, help="micro-batches of a step (default: 1; may go with --batch)"
    )
    group.add_argument(
        "--global-batch",
        metavar="G",
        type=samples,
        help="samples of a whole step; planning chooses how many at a time (default: one micro-batch a step)",
    )


def add_restrictions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("restrictions")
    group.add_argument(
        "--pin",
        metavar="PATTERN=MODE",
        action="append",
        type=read_pin,
        help="use this mode for the units whose name matches, such as 'lm_head=keep'; may be repeated",
    )
    group.add_argument(
        "--modes", metavar="A,B", type=read_modes, help="use these modes only (default: all that the cluster has)"
    )
    group.add_argument("--no-split", action="store_true", help="do not split operators into slices")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--recompute",
        choices=WORDS,
        help="of every block none, all but products and attention (selective), or all of its activations (full);"
        " auto chooses for each (default: auto)",
    )
    how.add_argument("--no-recompute", action="store_true", help="the same as --recompute none")


def asked_recompute(arguments: argparse.Namespace) -> str:
    return Recompute.NONE.value if arguments.no_recompute else arguments.recompute or AUTO


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the plan as one JSON document")
    group.add_argument("-o", "--output", metavar="FILE", type=output_path, help="save the plan to this file")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument(
        "--verify",
        action="store_true",
        help="run the plan's step on fake tensors, and plan again where its peak differs",
    )


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    return mode


@checked
def read_pin(text: str) -> tuple[str, str]:
    pattern, equals, mode = text.rpartition("=")
    if not equals or not pattern.strip():
        raise UsageError(f"{text!r} is not PATTERN=MODE; write it as 'lm_head=keep'")
    return pattern.strip(), _known_mode(mode.strip())


@checked
def chunks(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    number = samples(text)
    if number > 1024:
        raise UsageError(f"{number} chunks are too many; give 1 to 1024")
    return number


@checked
def read_modes(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_known_mode(mode.strip()) for mode in text.split(",")))


def run(arguments: argparse.Namespace) -> None:
    pins = pins_of(arguments.pin or ())
    if arguments.batch is not None and arguments.global_batch is not None:
        raise UsageError(
            f"--batch {arguments.batch} and --global-batch {arguments.global_batch} exclude each other; "
            "--batch fixes one device's micro-batch, --global-batch the whole step's samples: give one of them"
        )
    arguments.cluster = with_rates(arguments)
    if arguments.host_memory is not None:
        arguments.cluster = replace(arguments.cluster, host_memory_bytes=arguments.host_memory)
    from osdp.model.source import load_model

    source = load_model(arguments.model, seq_len=arguments.seq_len)
    arguments.tried = []
    try:
        plan = _plan(arguments, source, pins)
    except DoesNotFit as error:
        if arguments.json:
            print_json({"version": PLAN_VERSION, "error": misfit_dict(error)})
        raise
    _deliver(plan, arguments)


def pins_of(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for pattern, mode in pairs:
        if pins.setdefault(pattern, mode) != mode:
            raise UsageError(f"--pin gives {pattern!r} the modes {pins[pattern]} and {mode}; keep one of them")
    return pins


def _plan(arguments: argparse.Namespace, source: ModelSource, pins: dict[str, str]) -> Plan:
    with shown_progress(arguments.quiet) as progress:
        from osdp.api import plan
        from osdp.planning import Progress

        if progress is not None:
            progress(Progress("build", 0, 0, 1, 0.0))
        return plan(
            source.build_on_meta(),
            source.inputs,
            arguments.cluster,
            memory=arguments.memory,
            precision=arguments.precision,
            optimizer=arguments.optimizer,
            reduce_dtype=arguments.reduce_dtype,
            batch=arguments.batch,
            accumulation=arguments.accumulation,
            global_batch=arguments.global_batch,
            pin=pins or None,
            modes=arguments.modes,
            split=not arguments.no_split,
            recompute=asked_recompute(arguments),
            compiled=arguments.compiled,
            loss_chunks=arguments.loss_chunks,
            loss=source.loss,
            name=arguments.model,  # what was asked for, so that `osdp graph` finds the model again
            seq_len=source.seq_len,
            progress=progress,
            verify=arguments.verify,
            offload=arguments.offload,
            tensor=arguments.tensor,
            pipeline=arguments.pipeline,
            stage=arguments.stage,
            interleave=arguments.interleave,
            expert=arguments.expert,
            sequence_parallel=arguments.sequence_parallel,
            layout=arguments.layout,
            on_layout=arguments.tried.append,
        )


def _deliver(plan: Plan, arguments: argparse.Namespace) -> None:
    if arguments.output is not None:
        plan.save(arguments.output)
    if arguments.json:
        print_json(plan.to_dict())
        return
    from osdp.report.page import plan_page
    from osdp.report.printing import console
    from osdp.report.terminal import print_plan

    print_plan(plan_page(plan), console(sys.stdout))
    if arguments.tried:
        from osdp.report.layouts_page import layout_rows, print_layouts

        print_layouts(layout_rows(arguments.tried), console(sys.stdout))
    if arguments.verify:
        peak = format_bytes(plan.predicted.peak_bytes)
        print(f"\nverified: a dry run of this plan peaks at {peak}, {plan.predicted.peak_at}")
    if arguments.output is not None:
        print(f"saved to {arguments.output}")


def misfit_dict(error: DoesNotFit) -> dict[str, Any]:
    return {
        "message": str(error),
        "peak_bytes": error.peak_bytes,
        "limit_bytes": error.limit_bytes,
        "peak_at": error.peak_at,
        "memory_parts": dict(error.memory_parts),
        "remedies": [
            {"change": each.change, "peak_bytes": each.peak_bytes, "estimate": each.estimate} for each in error.remedies
        ],
    }
