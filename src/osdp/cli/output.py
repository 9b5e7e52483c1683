"""What leaves a command: JSON on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
