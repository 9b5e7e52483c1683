"""Claim: planning and training touch no network but the ranks' own: loopback and sockets of this machine.

An audit hook in every process sees each connection, address lookup and message before it is made, also those of
libraries, and ends the process at the first that would leave the machine. What C++ code connects to (gloo, the store of
the ranks) is seen by the system: a namespace without any interface but loopback has no other network to reach, where
this machine allows one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import TESTS, running, two_ranks

SITE = """
import ipaddress, os, sys

def watch(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        target = args[1]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        target = (args[0],)
    else:
        return
    if not isinstance(target, tuple):
        return  # a socket of this machine
    host = target[0].decode() if isinstance(target[0], bytes) else target[0]
    try:
        inside = not host or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        os.write(2, f"network: {event} {host}\\n".encode())
        os._exit(77)

sys.addaudithook(watch)
"""


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process that is started from here on is watched from its first line."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def _python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=TESTS, capture_output=True, text=True, timeout=200)


@pytest.mark.usefixtures("watched")
def test_the_watch_ends_whatever_leaves_the_machine() -> None:
    ended = _python("-c", "import socket; socket.create_connection(('192.0.2.1', 80), 1)")
    assert (ended.returncode, ended.stderr) == (77, "network: socket.getaddrinfo 192.0.2.1\n")
    assert _python("-c", "import urllib.request as r; r.urlopen('http://example.com')").returncode == 77


@pytest.mark.usefixtures("watched")
def test_planning_a_hugging_face_model_uses_no_network(tmp_path: Path) -> None:
    config = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 96,'
    config += ' "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}'
    (tmp_path / "config.json").write_text(config)
    ended = _python("-m", "osdp", "plan", str(tmp_path / "config.json"), "--cluster", "2xCPU", "--seq-len", "16")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("watched")
def test_training_on_two_ranks_uses_no_network() -> None:
    arguments = ("-m", "osdp", "train", "tiny_lm:build", "--steps", "2", "--global-batch", "4", "--json", "--quiet")
    with running(*two_ranks(*arguments)) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], [rank.errors for rank in ranks]


def _isolated(*command: str) -> list[str]:
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *command]


def test_one_rank_trains_where_there_is_no_network_at_all() -> None:
    can = subprocess.run(_isolated("-c", ""), capture_output=True)
    if can.returncode != 0:
        pytest.skip("this machine makes no network namespaces for this user")
    train = ("-m", "osdp", "train", "tiny_lm:build", "--steps", "1", "--global-batch", "4", "--json", "--quiet")
    ended = subprocess.run(_isolated(*train), cwd=TESTS, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
