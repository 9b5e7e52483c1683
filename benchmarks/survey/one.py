"""One architecture in a forked process: trained, planned, dry-run."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import torch
from torch import nn

import osdp
import osdp.model.capture as capturing
from benchmarks.survey.architectures import Architecture, candidates
from benchmarks.survey.examples import BATCH, Example, examples
from osdp.model.capture import capture, scaled_inputs
from osdp.model.graph import ModelGraph
from osdp.verify import verify

PLANNED = "planned"


def warm_up() -> None:
    """What every process would import for itself is imported before they are forked."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    capture(model, (torch.randn(2, 4),), loss=lambda output: output.sum())


def surveyed(architecture: Architecture, *, seconds: float, dry_run: bool) -> dict[str, Any]:
    """What became of it: not trained, not planned (and why), or planned.

    The process may use so many seconds of a core; by the clock, which a busy machine segments, it has ten times that.
    """
    row = {"name": architecture.name, "kind": architecture.kind, "outcome": "not trained", "why": ""}
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        _child(architecture, writing, dry_run)
    os.close(writing)
    for line in _lines(reading, began + 10 * seconds):
        row.update(line)
    if row.pop("over", None) is None:
        row["why"] = row["why"] or f"over {seconds:.0f} s of a core, or the process ended"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _lines(pipe: int, deadline: float) -> list[dict[str, Any]]:
    text = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        read = os.read(pipe, 1 << 16)
        if not read:
            break
        text += read
    return [json.loads(line) for line in text.decode().split("\n")[:-1]]


def _child(architecture: Architecture, pipe: int, dry_run: bool) -> None:
    def say(**facts: Any) -> None:
        os.write(pipe, (json.dumps(facts) + "\n").encode())

    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if not os.environ.get("SURVEY_DEBUG"):
            os.dup2(quiet, 2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _survey(architecture, say, dry_run)
    except BaseException as error:
        say(why=_reason(error))
    finally:
        say(over=True)
        os._exit(0)


def _survey(architecture: Architecture, say: Any, dry_run: bool) -> None:
    found = _trained(architecture, say)
    if found is None:
        return
    model, example = found
    say(outcome="not planned", why="", parameters=sum(p.numel() for p in model.parameters()))
    began = time.monotonic()
    graphs = _captured_graphs()
    try:
        plan = osdp.plan(model, example, "4xCPU", batch=BATCH)
    except Exception as error:
        if os.environ.get("SURVEY_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        say(why=_reason(error))
        return
    say(outcome=PLANNED, why="", plan_seconds=round(time.monotonic() - began, 1))
    if dry_run:
        _compare(model, example, plan, graphs[0], say)


def _captured_graphs() -> list[ModelGraph]:
    """The graphs that `osdp.plan` captures from now on: a dry run is compared with the one that it planned."""
    graphs: list[ModelGraph] = []

    def remembering(*args: Any, **kwargs: Any) -> ModelGraph:
        graphs.append(capture(*args, **kwargs))
        return graphs[-1]

    capturing.capture = remembering
    return graphs


def _compare(model: nn.Module, example: Example, plan: osdp.Plan, graph: ModelGraph, say: Any) -> None:
    try:
        truth = verify(plan, graph, build=lambda: model, inputs=scaled_inputs(example))
        say(error=truth.error, collectives=truth.first_difference)
    except Exception as error:
        if os.environ.get("SURVEY_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        say(dry_run_why=_reason(error))


def _trained(architecture: Architecture, say: Any) -> tuple[nn.Module, Example] | None:
    for model in candidates(architecture):
        for example in examples(architecture.kind, model):
            try:
                loss = model(**example).loss
                loss.backward()
            except Exception as error:
                say(why=_reason(error))
                continue
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            if loss.isfinite() and grads:
                return model, example
            say(why="the loss is not finite, or nothing has a gradient")
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"
