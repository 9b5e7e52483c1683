"""Runs the commands whose output stands in README and docs, and puts what they print today into the pages.

python docs/refresh_outputs.py             # every page; some minutes, no accelerator
python docs/refresh_outputs.py seeing.md   # pages with these names

A block that is refreshed has a line before it: `<!-- printed by: COMMAND; COMMAND | HEADING, HEADING -->`. It gets what
the last command prints, whole or the parts with these headings. questions.md has a script of its own,
make_questions.py; `make demo` prints its block of the README.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from make_questions import run, shown

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(
    r"(<!-- printed by: (?P<commands>.*?)(?: \| (?P<parts>.*?))? -->\n```\w*\n)(?P<text>.*?)(?=^```)", re.M | re.S
)


def main() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if not sys.argv[1:] or page.name in sys.argv[1:]:
            text = page.read_text(encoding="utf-8")
            page.write_text(MARKED.sub(refreshed, text), encoding="utf-8")


def refreshed(found: re.Match[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        printed = ""
        for command in found["commands"].split("; "):
            print(command, file=sys.stderr)
            printed = run(command)
        os.chdir(ROOT)
    lines = shown(printed, tuple(found["parts"].split(", "))) if found["parts"] else printed.strip("\n").splitlines()
    return found[1] + "".join(f"{line.rstrip()}\n" for line in lines)


if __name__ == "__main__":
    main()
