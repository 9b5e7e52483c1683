"""Adapters under a plan beside plain FSDP2, on hosts that a slow network joins (root needed).

    python benchmarks/bench_lora.py --hosts 2 --ranks-per-host 2 --across 500mbit

A Llama with PEFT adapters on the products of attention is trained in turn by plain FSDP2 (every block and the model
sharded), by osdp's FSDP (every unit free) and by the plan, each in processes of its own. Peaks are resident memory of
the steps after the first, above what a process held before it built the model, of the rank that needs most; what was
predicted stands beside them. Losses must be equal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from cluster import SimulatedCluster, bits_per_second
from common import Row, deliver, parser

from osdp.cluster import Cluster, Link, parse_bytes

FSDP2, FREE, PLAN = "plain FSDP2", "FSDP, by osdp", "the plan"
NETWORK_LATENCY_SECONDS = 1e-4
BATCH, LENGTH = 2, 64


def arguments() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--ranks-per-host", type=int, default=2)
    made.add_argument("--across", default="500mbit", help="each host's link (default %(default)s)")
    made.add_argument("--memory", default="160MiB", help="of a rank (default %(default)s)")
    made.add_argument("--width", type=int, default=384, help="of the model (default %(default)s)")
    made.add_argument("--layers", type=int, default=6, help="of the model (default %(default)s)")
    made.add_argument("--steps", type=int, default=6, help="of each way, beside the first (default %(default)s)")
    made.add_argument("--worker", metavar="WAY", help="run as one rank; the benchmark starts these itself")
    made.add_argument("--plan", help="the plan of a worker")
    return made


def main() -> int:
    args = arguments().parse_args()
    if args.worker:
        return work(args)
    given = [word for word in sys.argv[1:] if word != "--json"]
    rows: list[Row] = []
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system, and out of resident memory
    with (
        tempfile.TemporaryDirectory() as folder,
        SimulatedCluster(hosts=args.hosts, ranks_per_host=args.ranks_per_host, across=args.across) as cluster,
    ):
        for way, plan in planned(args).items():
            file = Path(folder) / "plan.json"
            plan.save(file)
            command = [sys.executable, __file__, "--worker", way, "--plan", str(file), *given]
            rows.append(cluster.measured(command, timeout=900))
            rows[-1]["gain"] = rows[0]["step s"] / rows[-1]["step s"]
    deliver({f"{args.hosts} hosts of {args.ranks_per_host}, {args.across}": rows}, as_json=args.json)
    return 0


def planned(args: Namespace) -> dict[str, Any]:
    """The plan of every way; plain FSDP2 is predicted as FSDP is."""
    import torch

    import osdp

    network = Link(bits_per_second(args.across) / 8, NETWORK_LATENCY_SECONDS)
    machines = Cluster.of(
        "CPU",
        nodes=args.hosts,
        devices_per_node=args.ranks_per_host,
        network=network,
        memory=parse_bytes(args.memory),
    )
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    example = {"input_ids": tokens, "labels": tokens}
    asked: dict[str, Any] = {"batch": BATCH, "precision": "fp32", "split": False}
    free = osdp.plan(adapted(args), example, machines, modes=["free"], recompute=False, **asked)
    return {FSDP2: free, FREE: free, PLAN: osdp.plan(adapted(args), example, machines, **asked)}


def adapted(args: Namespace) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        vocab_size=1024,
        use_cache=False,
    )
    wanted = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(LlamaForCausalLM(config).train(), wanted)


def work(args: Namespace) -> int:
    """One rank of one way."""
    import torch
    import torch.distributed as dist

    import osdp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm_up(args)
    plan = osdp.Plan.load(args.plan)
    found = row(args, plan, sharded if args.worker == FSDP2 else lambda model: osdp.parallelize(model, plan))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def warm_up(args: Namespace) -> None:
    """A step of a small model, so that what is loaded at first use is no part of the peak."""
    import torch

    small = sharded(adapted(Namespace(width=32, layers=1)))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    small(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], foreach=True).step()


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.base_model.model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def row(args: Namespace, plan: Any, apply: Callable[[Any], Any]) -> Row:
    """Trains one way; what was measured of the slowest and largest rank, and what the plan predicts."""
    import gc

    import torch
    import torch.distributed as dist

    from osdp.training.memory import PeakMemory

    gc.collect()
    memory = PeakMemory(torch.device("cpu"))
    model = apply(adapted(args))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    seconds, loss = [], torch.zeros(())
    for step in range(args.steps + 1):
        torch.manual_seed(100 * step + int(os.environ["RANK"]))
        tokens = torch.randint(0, 1024, (BATCH, LENGTH))
        dist.barrier()
        began = perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - began)
        if step == 0:
            PeakMemory(torch.device("cpu"))  # forgets the peak so far, which had the whole model
    found = torch.tensor([median(seconds[1:]), memory.peak_bytes(), loss.item()], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    held: dict[str, int] = {}
    for unit in plan.units:
        held[unit.mode] = held.get(unit.mode, 0) + unit.parameters
    return {
        "way": args.worker,
        "step s": float(found[0]),
        "predicted s": plan.predicted.step_seconds,
        "samples/s": BATCH * dist.get_world_size() / float(found[0]),
        "peak MiB": float(found[1]) / 2**20,
        "predicted MiB": plan.predicted.peak_bytes / 2**20,
        "loss": float(found[2]),
        "held": ", ".join(f"{mode} {count:,}" for mode, count in held.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
