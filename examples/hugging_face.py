"""A Hugging Face model, from its configuration: nothing is downloaded, and no rank ever holds it whole.

torchrun --nproc-per-node 2 examples/hugging_face.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import osdp
from osdp.training.data import demo_text

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).train()
example = torch.zeros(1, 64, dtype=torch.long)
# Parameters, gradients and AdamW's states alone are 16 bytes each, so the plan cannot replicate them all.
plan = osdp.plan(
    model, {"input_ids": example, "labels": example}, f"{ranks}xCPU", memory="6MiB", precision="fp32", batch=2
)
osdp.parallelize(model, plan)
osdp.initialize(model, seed=0)
torch.manual_seed(0)  # all ranks draw alike, and each takes its own part
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(demo_text().read_bytes()), dtype=torch.uint8).long()

if rank == 0:
    print({unit.name: unit.mode for unit in plan.units})
for step in range(int(os.environ.get("STEPS", "20"))):
    starts = torch.randint(len(text) - 64, (ranks, plan.batch_size)).tolist()[rank]
    tokens = torch.stack([text[start : start + 64] for start in starts])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    osdp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()
