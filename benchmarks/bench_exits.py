"""Starts and ends a small training script on two gloo ranks, many times, and counts the clean exits.

    python benchmarks/bench_exits.py                     # 500 starts, forked from a process that has torch loaded
    python benchmarks/bench_exits.py --runs 60 --fresh   # each rank a new interpreter

A rank trains three steps under a plan and ends as users' scripts do: it destroys the process group, it does not, it
drops the model first, it leaves a generator or a forward without backward behind, or it calls sys.exit. In every case
its interpreter is finalized. An exit is clean if the code is the expected one; a thread that outlives the interpreter
shows as an abort (-6).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, deliver, met, parser

if TYPE_CHECKING:
    from torch import nn

RANKS, STEPS, TIMEOUT_SECONDS = 2, 3, 60
ENDS = {"destroyed": 0, "not destroyed": 0, "model dropped": 0, "forward left": 0, "loop left": 0, "sys.exit(3)": 3}


def model() -> nn.Module:
    import torch

    from osdp.model.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, positions=16, layers=(2,), widths=(64,)))


def plan(file: Path) -> None:
    import torch

    import osdp
    from osdp.sharding import FREE, KEEP, REPLICATE

    example = torch.zeros(1, 16, dtype=torch.long)
    found = osdp.plan(model(), (example, example), f"{RANKS}xCPU", precision="fp32", batch=2, accumulation=2)
    modes = (FREE, KEEP, REPLICATE)
    plain: dict[str, Any] = {"splits": 1, "sharded_splits": 1, "reduced_with": None, "gather_once": False}
    units = [
        replace(unit, mode=modes[index % 3], reduce_once=index % 2 == 0, **plain)
        for index, unit in enumerate(found.units)
    ]
    replace(found, units=tuple(units)).save(file)


def train(rank: int, folder: Path, store: Path, end: str) -> None:
    """A user's script, up to its last line."""
    import torch
    import torch.distributed as dist

    import osdp

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    own = osdp.parallelize(model(), osdp.Plan.load(folder / "plan.json"))
    optimizer = torch.optim.AdamW(own.parameters())
    tokens = torch.arange(32).view(2, 16)
    for _ in range(STEPS):
        for batch in osdp.accumulate(own, [tokens, tokens]):
            own(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if end == "forward left":
        globals()["left"] = own(tokens, tokens)
    if end == "loop left":
        globals()["left"] = osdp.accumulate(own, [tokens, tokens])
        own(next(globals()["left"]), tokens).backward()
        globals()["model"] = own
    if end == "model dropped":
        del own, optimizer
    if end in ("destroyed", "model dropped", "forward left"):
        dist.destroy_process_group()
    if end == "sys.exit(3)":
        sys.exit(3)


def forked(rank: int, folder: Path, store: Path, end: str) -> int:
    """The number of a child; the child itself returns 0 from here, and ends as a script does."""
    number = os.fork()
    if number == 0:
        os.dup2(os.open(folder / f"{store.name}-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
        train(rank, folder, store, end)
    return number


def started(rank: int, folder: Path, store: Path, end: str) -> int:
    command = [sys.executable, __file__, "--rank", str(rank), str(folder), str(store), end]
    with (folder / f"{store.name}-{rank}.err").open("w") as errors:
        return subprocess.Popen(command, stderr=errors).pid


def codes(numbers: list[int]) -> list[int]:
    """How processes ended; those that hang are killed."""
    until, found = time.monotonic() + TIMEOUT_SECONDS, dict[int, int]()
    while len(found) < len(numbers):
        for number in set(numbers) - set(found):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                found[number] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(number, signal.SIGKILL)
        time.sleep(0.005)
    return [found[number] for number in numbers]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=500)
    options.add_argument("--fresh", action="store_true", help="a new interpreter for every rank")
    options.add_argument("--end", choices=ENDS, help="this way to end alone")
    options.add_argument("--rank", nargs=4, help="used by --fresh: one rank of one run")
    given = options.parse_args()
    if given.rank:
        rank, folder, store, end = given.rank
        train(int(rank), Path(folder), Path(store), end)
        return
    folder = Path(tempfile.mkdtemp())
    command = f"import bench_exits, pathlib; bench_exits.plan(pathlib.Path({str(folder / 'plan.json')!r}))"
    subprocess.run([sys.executable, "-c", command], check=True, cwd=Path(__file__).parent)
    if not given.fresh:
        import torch._dynamo  # noqa: F401

        import osdp.runtime.apply  # noqa: F401
    seen: dict[str, Counter[str]] = {end: Counter() for end in ENDS}
    for run in range(given.runs):
        end = given.end or list(ENDS)[run % len(ENDS)]
        numbers = []
        for rank in range(RANKS):
            number = (started if given.fresh else forked)(rank, folder, folder / f"store-{run}", end)
            if number == 0:
                return  # a child, at the end of its script
            numbers.append(number)
        for rank, code in enumerate(codes(numbers)):
            seen[end]["clean" if code == ENDS[end] else f"exit {code}"] += 1
            if code != ENDS[end]:
                said = (folder / f"store-{run}-{rank}.err").read_text()
                print(f"run {run}, rank {rank}, {end}: exit {code}\n{said[-2000:]}", file=sys.stderr)
    shutil.rmtree(folder)
    rows: list[Row] = []
    for end, counts in seen.items():
        total = sum(counts.values())
        if not total:
            continue
        others = ", ".join(f"{count} x {what}" for what, count in counts.items() if what != "clean")
        rows.append(
            {
                "end": end,
                "ranks ended": total,
                "clean": counts["clean"],
                "others": others,
                "target: all clean": met(total - counts["clean"], 0),
            }
        )
    deliver({"exits": rows}, as_json=given.json)


if __name__ == "__main__":
    main()
