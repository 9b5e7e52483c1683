"""The documentation builds without a warning, and its Python is Python: names and keywords of osdp's are real.

Every command of its console blocks is one that osdp takes, with a model that it knows. Python blocks are run in
test_pages_run.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

import osdp
from osdp.cli.main import build_parser
from osdp.cluster import Cluster
from osdp.model.source import presets

CONSOLE = re.compile(r"^```(?:console|bash|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .*?-m osdp|osdp) (.*)")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """What a block names of osdp, with the keywords of calls."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("osdp."):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", []
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"osdp\.\w+(\.\w+)?", dotted(node)):
            call = calls.get(id(node))
            yield dotted(node), [k.arg for k in call.keywords if k.arg] if call else []


def looked_up(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    if (name.startswith("osdp.") and name.count(".") == 1) or module == "osdp.Plan":
        owner: object = osdp.Plan if module == "osdp.Plan" else osdp
    else:
        owner = __import__(module, fromlist=[attribute])
    return getattr(owner, attribute)


def test_every_page_has_real_python() -> None:
    seen = 0
    for page in PAGES:
        for block in blocks(page):
            for name, keywords in uses(ast.parse(block.text)):
                value = looked_up(name)
                seen += 1
                if keywords and callable(value):
                    parameters = inspect.signature(value).parameters
                    assert set(keywords) <= set(parameters), f"{page}: {name} has no {keywords}"
    assert seen > 40


def commands(page: str) -> Iterator[list[str]]:
    """The words of each osdp command in fenced and indented blocks; lines that leave something out have an ellipsis."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / page).read_text(encoding="utf-8"))
    for block in (*CONSOLE.findall(text), *INDENTED.findall(text)):
        for line in block.splitlines():
            found = COMMAND.match(line)
            if found and "…" not in line:
                words = shlex.split(found[1].replace("$cluster", "8xA100-80GB"), comments=True)
                ends = [words.index(end) for end in (">", "|", "||", "&&") if end in words]
                yield words[: min(ends, default=len(words))]


def test_every_command_is_one_that_osdp_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.toml").write_text(Cluster.parse("8xA100-80GB").to_toml())
    parser, seen = build_parser(), 0
    for page in PAGES:
        for words in commands(page) if page != "docs/log.md" else ():
            arguments = parser.parse_args(words)  # exits where one is not known
            model = getattr(arguments, "model", None)
            assert not model or re.search("[:/.]", model) or model in presets(), f"{page}: {' '.join(words)}"
            seen += 1
    assert seen > 50


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Fourteen questions" in index and (tmp_path / "reference/python.html").is_file()
    assert "load_pretrained" in (tmp_path / "reference/python.html").read_text(encoding="utf-8")
