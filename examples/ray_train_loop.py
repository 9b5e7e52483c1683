"""A training loop inside Ray Train: Ray starts the workers and their process group, osdp plans and shards.

pip install "ray[train]"; python examples/ray_train_loop.py

`train_steps` needs no Ray and is what the tests run; the few lines around it have not been run with Ray here.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import osdp
from osdp.model.gpt import GPT, GPTConfig
from osdp.training.data import demo_text


def train_steps(config: dict[str, Any], report: Callable[[dict[str, float]], None]) -> None:
    """Runs on every worker, when the process group is there already."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), osdp.start()
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, positions=64, layers=(4,), widths=(128,)))
    example = torch.zeros(1, 64, dtype=torch.long)
    precision = "fp32" if device.type == "cpu" else "bf16"
    plan = osdp.plan(model, (example, example), config["cluster"], precision=precision, batch=4)
    osdp.parallelize(model, plan)
    osdp.initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = osdp.load_checkpoint(config["checkpoint"], model, optimizer)  # a folder that all workers share
    text = torch.frombuffer(bytearray(demo_text().read_bytes()), dtype=torch.uint8).long()
    for step in range(done.step if done else 0, config["steps"]):
        torch.manual_seed(step)  # all ranks draw alike, and each takes its own part
        starts = torch.randint(len(text) - 65, (ranks, plan.batch_size)).tolist()[rank]
        windows = torch.stack([text[start : start + 65] for start in starts]).to(device)
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        osdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report({"step": step + 1, "loss": loss.item()})
    if done is None or done.step < config["steps"]:
        osdp.save_checkpoint(config["checkpoint"], model, optimizer, step=config["steps"])


def train_loop_per_worker(config: dict[str, Any]) -> None:
    from ray import train

    train_steps(config, train.report)


def main() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # On GPUs: use_gpu=True, TorchConfig(backend="cpu:gloo,cuda:nccl") and a cluster such as "8xH100-80GB". Nodes must
    # have as many workers each as the cluster says.
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"cluster": "2xCPU", "steps": 20, "checkpoint": "/mnt/shared/run1"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()


if __name__ == "__main__":
    main()
