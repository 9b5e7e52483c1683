"""Writes questions.md: 14 questions people ask before they train, each with one command and what it prints.

python docs/make_questions.py        # some minutes; needs osdp, no accelerator
python docs/make_questions.py 3 7    # these again, the others as they stand in the page
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LLAMA = "osdp plan llama3-8b --cluster 2x8xA100-40GB"
FSDP = "osdp plan gpt2-xl --cluster 8xRTX-3090 --batch 4 --modes free --no-split --no-recompute"

MEMORY, COMPARED, RATE = "Memory of each device", "Compared with", None


@dataclass(frozen=True)
class Question:
    """`sections` are the parts of the page that answer it: the first one, or those with these headings."""

    text: str
    command: str
    sections: tuple[str | None, ...]
    answer: str


QUESTIONS = (
    Question(
        "What is the expected peak memory with my configuration?",
        FSDP,
        (MEMORY,),
        "Give the configuration, plain FSDP2 at a micro-batch of 4 here. Where it does not fit, the exit code is 3."
        " `osdp verify` runs the real runtime on fake tensors and compares the peak.",
    ),
    Question(
        "If I change my wrapping, what does that do to the peak?",
        FSDP.replace(" --no-split", ""),
        (MEMORY,),
        "What is gathered together is part of the plan. The same with blocks gathered by operators, and operators"
        " in slices, allowed: here the peak is made of activations, and wrapping does not change it.",
    ),
    Question(
        "What is the best batch size?",
        "osdp plan gpt2-xl --cluster 8xRTX-3090",
        (RATE,),
        "Leave it out: the plan is the fastest over all micro-batches.",
    ),
    Question(
        "What is the longest sequence that fits?",
        f"{LLAMA} --seq-len 16384 --batch 1",
        (RATE, MEMORY),
        "Ask for a length. If it does not fit, the exit code is 3, and the page says by how much and what would help.",
    ),
    Question(
        "What does the number of devices do to the peak?",
        f"{LLAMA.replace('2x8', '1x8')} --batch 1",
        (RATE, MEMORY),
        "Plan for another cluster: half of the devices of question 4.",
    ),
    Question(
        "How much memory do I save with the optimizer on the CPU?",
        "osdp plan llama3-8b --cluster 8xA100-40GB --batch 1 --memory 24GiB",
        (MEMORY, "Memory of each node's host"),
        "Where nothing fits otherwise, whole units are on the host (parameters, gradients and optimizer states), and"
        " inputs of blocks that are recomputed. Without them the smallest peak is 25.2 GiB, 2.9 GiB above the limit:"
        " `--offload none` says so.",
    ),
    Question(
        "Which activation checkpointing should I use?",
        "osdp plan gpt2-xl --cluster 8xRTX-3090 --batch 8",
        ("Plan",),
        "The plan decides it block by block; here at a micro-batch of 8.",
    ),
    Question(
        "How do checkpointing policies compare?",
        "osdp plan gpt2-xl --cluster 8xRTX-3090 --batch 8",
        (COMPARED,),
        "Every baseline is priced with no block recomputed, with all selectively (what products and attention put out"
        " is saved), and with all in full.",
    ),
    Question(
        "What if I checkpoint some blocks only?",
        "osdp plan gpt2-xl --cluster 8xRTX-3090 --batch 8 --no-recompute --offload none",
        (RATE,),
        "That is what question 7 does. Without any recompute, the same batch:",
    ),
    Question(
        "What does reducing gradients in fp32 cost?",
        f"{FSDP} --reduce-dtype bf16",
        (MEMORY,),
        "fp32 is what question 1 has; in bf16 the peak is the same here, as no reduction is under way where it is"
        " reached. The price is traffic: without `--batch 4` the first lines of the page differ.",
    ),
    Question(
        "What does another precision do to the peak?",
        f"{FSDP} --precision pure-bf16",
        (MEMORY,),
        "Parameters and states in bf16 too; compare with question 1:",
    ),
    Question(
        "When does HSDP make sense?",
        f"{LLAMA} --batch 1",
        (COMPARED,),
        "When it is the fastest row; the plan may also take it for some units only (`free_in_node`, `keep_in_node`).",
    ),
    Question(
        "Can I reshard to a smaller mesh after forward?",
        f"{LLAMA} --batch 1 --modes free_to_node --no-split",
        (RATE, MEMORY),
        "`free_to_node` is FSDP2's `reshard_after_forward=8` on nodes of 8, here for every unit.",
    ),
    Question(
        "Can I leave parameters gathered after forward?",
        f"{LLAMA} --batch 1 --modes keep --no-split",
        (RATE, MEMORY),
        "`keep` is `reshard_after_forward=False`, here for every unit. Mixed with `free` it may fit where"
        " it does not alone: then leave `--modes` out.",
    ),
)


HEAD = (
    "# Fourteen questions, fourteen commands\n\n"
    "The [proposal of a memory tracker for FSDP2](https://github.com/pytorch/pytorch/pull/125323) lists what people ask"
    " before they train. Each is one command, on a laptop, without weights. All figures are predictions; outputs are"
    " cut to the part that answers. `python docs/make_questions.py` writes this page.\n"
)
PAGE = Path(__file__).with_name("questions.md")


def main() -> None:
    wanted = {int(word) for word in sys.argv[1:]} or set(range(1, len(QUESTIONS) + 1))
    standing = re.split(r"^(?=## \d+\. )", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for number, question in enumerate(QUESTIONS, 1):
        if number in wanted:
            print(f"{number}: {question.command}", file=sys.stderr)
            text = answered(number, question)
            standing[number - 1 : number] = [text]
            PAGE.write_text(HEAD + "\n" + "\n".join(each.rstrip("\n") + "\n" for each in standing))


def answered(number: int, question: Question) -> str:
    page = shown(run(question.command), question.sections)
    lines = [f"## {number}. {question.text}", "", question.answer, "", "```console", f"$ {question.command}"]
    return "\n".join([*lines, *(line.rstrip() for line in page), "```"]) + "\n"


@cache
def run(command: str) -> str:
    arguments = [sys.executable, "-m", "osdp", *command.split()[1:], "--quiet"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    return done.stdout + "".join(line for line in done.stderr.splitlines(True) if not line.startswith("\r"))


def shown(page: str, sections: tuple[str | None, ...]) -> list[str]:
    """Sections are parted by empty lines; the first two are the model and the rate."""
    parts = re.split(r"\n\s*\n", page.strip("\n"))
    found = []
    for section in sections:
        chosen = parts[:2] if section is None else [part for part in parts if part.startswith(section)]
        for part in chosen:
            found += [*part.rstrip().splitlines(), ""]
    return found[:-1]


if __name__ == "__main__":
    main()
