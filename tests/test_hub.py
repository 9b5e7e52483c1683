"""ORG/NAME is a model of the Hub: its config.json is read from the cache; without a network, a sentence says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from architectures import CONFIGS, tiny

CODE = """
import sys
from osdp.errors import UsageError
from osdp.model.source import load_model
try:
    source = load_model(sys.argv[1])
    print(source.name, sum(p.numel() for p in source.build_on_meta().parameters()))
except UsageError as error:
    print(error)
"""


def answer(home: Path, spec: str) -> str:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", CODE, spec], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_name_of_the_hub_is_read_from_the_cache_and_offline_is_said(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--some--llama.tiny"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    parameters = sum(parameter.numel() for parameter in tiny("llama").build_on_meta().parameters())
    assert answer(tmp_path, "some/llama.tiny") == f"some/llama.tiny {parameters}"
    said = answer(tmp_path, "some/other")
    assert said.startswith("some/other: there is no such file or folder here, it is not in the local cache, and")
    assert "hf download some/other config.json" in said
