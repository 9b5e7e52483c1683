"""Your own loop in a few lines: plan, parallelize, initialize, then train as always. On accelerators, or else on CPUs.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist

import osdp
from osdp.model.gpt import GPT, GPTConfig
from osdp.training.data import demo_text

device = osdp.start()  # this rank's accelerator, or the CPU, and the process group for it
rank, ranks = dist.get_rank(), dist.get_world_size()
with torch.device("meta"):
    model = GPT(GPTConfig(vocab_size=256, positions=64, layers=(4,), widths=(128,)))
example = torch.zeros(1, 64, dtype=torch.long)
plan = osdp.plan(model, (example, example), precision="fp32", global_batch=4 * ranks)  # for the ranks that run
osdp.parallelize(model, plan)
osdp.initialize(model, seed=0)
torch.manual_seed(0)  # all ranks draw alike, and each takes its own part
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(demo_text().read_bytes()), dtype=torch.uint8).long()

for step in range(int(os.environ.get("STEPS", "20"))):
    starts = torch.randint(len(text) - 65, (ranks, plan.accumulation, plan.batch_size)).tolist()[rank]
    micro_batches = [torch.stack([text[start : start + 65] for start in micro]).to(device) for micro in starts]
    losses = []
    for windows in osdp.accumulate(model, micro_batches):
        losses.append(model(windows[:, :-1], windows[:, 1:]) / plan.accumulation)
        losses[-1].backward()
    osdp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {sum(losses).item():.4f}")
dist.destroy_process_group()
