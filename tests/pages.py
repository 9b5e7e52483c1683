"""The Python blocks of README and docs, and how tests run them: page by page, in order, in one namespace.

A block that cannot run here has `<!-- not run: the reason -->` in the line before it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>.*?) -->\n)?^(?P<indent> *)```python\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    text: str
    line: int
    not_run: str | None


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(textwrap.dedent(found["text"]), text.count("\n", 0, found.start("text")) + 1, found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def run_page(page: str, *names: dict[str, Any], exchanged: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs every block of a page; `names[i]` are those that block i takes as given.

    `exchanged` puts what this machine has in the place of what a page has, such as a cluster; each is there.
    """
    left, space = set(exchanged or ()), {"__name__": "page"}
    for index, block in enumerate(blocks(page)):
        if block.not_run:
            print(f"{page}:{block.line} is not run: {block.not_run}")
            continue
        text = block.text
        for old, new in (exchanged or {}).items():
            left -= {old} if old in text else set()
            text = text.replace(old, new)
        space.update(names[index] if index < len(names) else {})
        exec(compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec"), space)  # lines as in the page
    assert not left, f"{page} has no {sorted(left)}"
    return space
