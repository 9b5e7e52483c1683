"""Writes requirements-hashed.txt: what osdp needs to run, with the hash of every file, for this platform.

    python .ci/hashes.py

pip resolves under constraints.txt without installing anything, and reports the files that it would install. See
SECURITY.md for how the list is used.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# What osdp needs to run, with the hash of every file, for {where}. Written by .ci/hashes.py.
# pip install --require-hashes -r requirements-hashed.txt, then pip install --no-deps --no-build-isolation .
"""


def main() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--constraint", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "install", *options, *needed]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)["install"]
    python = ".".join(platform.python_version_tuple()[:2])
    lines = [HEAD.format(where=f"{platform.system()} on {platform.machine()}, Python {python}, torch for CPUs")]
    for each in sorted(found, key=lambda each: each["metadata"]["name"].lower()):
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={each['metadata']['version']} --hash=sha256:{digest}\n")
    (ROOT / "requirements-hashed.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
