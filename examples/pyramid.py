"""Widths that change along the depth: what is narrow and what is wide need not be held, or recomputed, alike.

torchrun --nproc-per-node 2 examples/pyramid.py

The function `build` is also a model for the commands, run from this folder:

    osdp plan pyramid:build --cluster 4xL4
    osdp train pyramid:build
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import osdp
from osdp.model.gpt import GPT, GPTConfig
from osdp.training.data import demo_text


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Three stages of two blocks, each twice as wide as the one before."""
    config = GPTConfig(vocab_size=256, positions=64, layers=(2, 2, 2), widths=(32, 64, 128), head_width=16, tied=False)
    example = torch.zeros(1, 64, dtype=torch.long)
    return GPT(config), (example, example)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model, example = build()
    plan = osdp.plan(model, example, f"{ranks}xCPU", memory="8MiB", precision="fp32", batch=2)
    osdp.parallelize(model, plan)
    osdp.initialize(model, seed=0)
    torch.manual_seed(0)  # all ranks draw alike, and each takes its own part
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(demo_text().read_bytes()), dtype=torch.uint8).long()
    if rank == 0:
        for unit in plan.units:
            print(f"{unit.name:12} {unit.parameters:>8,} parameters: {unit.mode}, recompute {unit.recompute}")
    for step in range(int(os.environ.get("STEPS", "20"))):
        starts = torch.randint(len(text) - 65, (ranks, plan.batch_size)).tolist()[rank]
        windows = torch.stack([text[start : start + 65] for start in starts])
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        osdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
