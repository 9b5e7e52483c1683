"""What leaves a command: JSON on stdout, files written all or nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from osdp.errors import UsageError


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def write_json(document: Any, path: Path) -> None:
    write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Replaces the file in one step; whatever ends this leaves the old one or the new one, and nothing beside it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path") from None
    finally:
        partial.unlink(missing_ok=True)
