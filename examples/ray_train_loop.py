"""A training loop inside Ray Train: Ray starts the workers and their process group, osdp plans and shards.

pip install "ray[train]"; python examples/ray_train_loop.py FOLDER [STEPS]

FOLDER takes the checkpoints and must be one that all workers share. A run that is started again goes on from there, and
so do workers that Ray starts anew after a failure. `train_steps` needs no Ray.
"""

import sys
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
        if step + 1 == config["steps"] or (step + 1) % config["save_every"] == 0:
            osdp.save_checkpoint(config["checkpoint"], model, optimizer, step=step + 1)
        report({"step": step + 1, "loss": loss.item()})


def train_loop_per_worker(config: dict[str, Any]) -> None:
    from ray import train

    train_steps(config, train.report)


def main(folder: str, steps: int = 20) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    class PrintLoss(UserCallback):
        """Ray keeps metrics of reports with a checkpoint of its own only; this prints those of every report."""

        def after_report(self, run_context: Any, metrics: list[dict[str, float]], checkpoint: Any) -> None:
            loss = sum(each["loss"] for each in metrics) / len(metrics)
            print(f"step {metrics[0]['step']}: loss {loss:.3f}, mean of {len(metrics)} workers", flush=True)

    # On GPUs: use_gpu=True, TorchConfig(backend="cpu:gloo,cuda:nccl") and a cluster such as "8xH100-80GB". Nodes must
    # have as many workers each as the cluster says.
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"cluster": "2xCPU", "steps": steps, "checkpoint": folder, "save_every": 10},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(callbacks=[PrintLoss()], failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
