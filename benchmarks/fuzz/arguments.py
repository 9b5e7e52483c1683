"""Cases of arguments and of the environment that torchrun would set."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.fuzz.case import Case

_NUMBERS = (
    "0",
    "-1",
    "1.5",
    "1e3",
    "²",
    "nan",
    "inf",
    "",
    " ",
    "0x10",
    "9" * 30,
    "9" * 5000,
    "-" + "9" * 30,
    "2**3",
    "1000000000000",
)
_WORDS = ("", "fp8", "²", "None", "a" * 10_000, "free,", "\udcff")
_SIZES = ("0", "-3GiB", "16G", "nan", "1e99PiB", "", "GiB", "9" * 40 + "GiB", "1e-30B", "99999999PiB", "²GiB")
_CLUSTERS = (
    "",
    " ",
    "8x",
    "0xA100-80GB",
    "8xA999",
    "x" * 5000,
    "-1xA100-80GB",
    "²xA100-80GB",
    "999999999x999999999xA100-80GB",
    "1e3xA100-80GB",
    "8x8x8xA100-80GB",
    "no.toml",
    "/dev/zero",
    "a" * 5000 + ".toml",
    "1048577xA100-80GB",
)
_MODES = ("", "hold", "free,hold", ",", "FREE", "free;keep")
_PINS = ("", "lm_head", "=keep", "head=hold", "head=", "=", "no.such.module=keep")
_MODELS = (
    "",
    "gpt-tinny",
    "/dev/zero",
    "/dev/null",
    "/",
    ".",
    "no:such",
    ":",
    "a:",
    ":b",
    "os:path",
    "math:pi",
    "x" * 5000,
    "no/such/config.json",
    "\udcff",
    "osdp.errors:OsdpError",
    "a.b.c:d.e",
    "..:x",
)
_OUTPUTS = ("absent/plan.json", ".", "/", "/dev/null/x", "", "/proc/x", "a" * 5000)

BAD = {
    "plan": {
        "--batch": _NUMBERS,
        "--global-batch": (*_NUMBERS, "3", "1000000000"),
        "--seq-len": (*_NUMBERS, "100000"),
        "--memory": _SIZES,
        "--cluster": _CLUSTERS,
        "--precision": _WORDS,
        "--optimizer": _WORDS,
        "--reduce-dtype": _WORDS,
        "--modes": _MODES,
        "--pin": _PINS,
        "-o": _OUTPUTS,
        "--colour": _WORDS,
    },
    "train": {
        "--steps": _NUMBERS,
        "--lr": ("-1", "nan", "inf", "", "fast", "1e400", "²", "1e300"),
        "--clip": ("-1", "nan", "inf", "", "1e300"),
        "--warmup": _NUMBERS,
        "--seed": ("", "1.5", "nan", "9" * 30, "9" * 5000, "²"),
        "--timeout": _NUMBERS,
        "--validation": ("-1", "1", "2", "nan", "", "0.999999999999"),
        "--token-dtype": _WORDS,
        "--save-every": (*_NUMBERS, "3"),
        "--keep": _NUMBERS,
        "--batch": _NUMBERS,
        "--global-batch": _NUMBERS,
        "--memory": _SIZES,
        "--cluster": _CLUSTERS,
        "--plan": ("/dev/zero", "/dev/null", ".", "no.json", "a" * 5000),
        "--data": ("/dev/zero", "/dev/null", ".", "no.txt", "a" * 5000),
        "--modes": _MODES,
    },
    "profile": {
        "-o": ("profile.json", ".", "absent/p.toml"),
        "--batches": (*_NUMBERS, "1,,2", "1,0"),
        "--seconds": _NUMBERS,
    },
    "tune": {"--candidates": _NUMBERS, "--steps": _NUMBERS, "--timeout": _NUMBERS, "--modes": _MODES},
    "graph": {"--model": _MODELS, "-o": _OUTPUTS},
    "verify": {"--model": _MODELS},
}
GOOD = {
    "plan": ("plan", "gpt-tiny", "--cluster", "4xA100-80GB", "--no-split", "--no-recompute", "--quiet"),
    "train": ("train", "gpt-tiny", "--quiet"),
    "profile": ("profile", "--quiet"),
    "tune": ("tune", "gpt-tiny", "--quiet"),
}
HARMLESS = (
    ("--batch", "1"),
    ("--batch", "1048576"),
    ("--global-batch", "64"),
    ("--memory", "1"),
    ("--memory", "1024PiB"),
    ("--cluster", "1048576xA100-80GB"),
    ("--cluster", "1024x1024xA100-80GB"),
    ("--seq-len", "1"),
    ("--pin", "*=free"),
    ("--modes", "replicate"),
    ("--cluster", "CPU"),
    ("--memory", "1KiB"),
    ("--global-batch", "1048576"),
)

_VALUES = ("²", "-1", "", " 1", "1 ", "+1", "1.0", "one", "9" * 20, "0x1", "٣", "1e0", "999999999999")
VARIABLES = {
    "RANK": (*_VALUES, "1", "7"),
    "WORLD_SIZE": (*_VALUES, "0"),
    "LOCAL_RANK": (*_VALUES, "1", "7"),
    "LOCAL_WORLD_SIZE": (*_VALUES, "0", "2"),
    "MASTER_PORT": (*_VALUES, "0", "65536", "99999"),
}
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def argument_case(chance: random.Random, plan: Path) -> Case:
    choice = chance.random()
    if choice < 0.15:
        return _environment(chance)
    if choice < 0.25:
        return _harmless(chance)
    if choice < 0.35:
        model = chance.choice(_MODELS)
        command = chance.choice(("plan", "train", "profile"))
        argv = ("profile", "--model", model) if command == "profile" else (command, model)
        more = ("--cluster", "A100-80GB") if command == "plan" else ()
        return Case(f"{command} {model[:20]!r}", (*argv, *more), True)
    command = chance.choice(list(BAD))
    option = chance.choice(list(BAD[command]))
    value = chance.choice(BAD[command][option])
    good = GOOD.get(command, (command, str(plan)))
    if option == "--cluster":
        good = tuple(word for word in good if word not in ("--cluster", "4xA100-80GB"))
    return Case(
        f"{command} {option} {value[:20]!r}", (*good, f"{option}={value}" if option != "-o" else f"-o{value}"), True
    )


def _harmless(chance: random.Random) -> Case:
    chosen = chance.sample(HARMLESS, chance.choice((1, 1, 2, 3)))
    words = [word for pair in chosen for word in pair]
    return Case(f"plan {' '.join(words)}", (*GOOD["plan"], *words))


def _environment(chance: random.Random) -> Case:
    name = chance.choice(list(VARIABLES))
    value = chance.choice(VARIABLES[name])
    argv = ("train", "gpt-tiny", "--steps", "1", "--timeout", "30", "--quiet")
    return Case(f"{name}={value!r}", argv, nonsense=True, environment={**ALONE, name: value})
