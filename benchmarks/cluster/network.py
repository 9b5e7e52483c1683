"""Hosts as network namespaces, joined by a bridge, with token buckets (`tc tbf`) on every link.

[Note: Everything in namespaces] The bridge has a namespace of its own, the switch, so that nothing appears among the
machine's own interfaces, two clusters can use the same addresses, and deleting namespaces deletes all there is.

[Note: Names] A namespace is called `osdp-<pid>-<start>-<name>`, after the process that made it and the moment when that
process started. Where no such process lives, the namespace is a leftover, and whoever comes next removes it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

NETNS = Path("/run/netns")
NAME = re.compile(r"osdp-(?P<pid>\d+)-(?P<start>\d+)-")
SUBNET = IPv4Network("10.77.0.0/16")
DEVICE = "eth0"  # a host's end of its link
MTU = 9000  # as in clusters; with 1500, headers alone would take 4 % of the asked rate
PATHS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # root's programs, for users whose PATH lacks them
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# A bucket that fills up before a late timer empties it loses that time for good; a larger one lets more bytes pass at
# once after a pause. It must hold the largest packet: 64 KiB and headers on loopback, and as much on the links, where
# TCP leaves segmentation to the device.
BURST_SECONDS = 1e-3
LEAST_BURST_BYTES = 80_000
QUEUE_MILLISECONDS = 50  # room for several hosts that send to one at once, before packets are dropped


class ClusterUnavailable(RuntimeError):
    """This machine cannot hold a simulated cluster; the message says what to do."""


def bits_per_second(rate: str) -> float:
    """`500mbit` as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{rate!r} is not a rate; write it as 800kbit, 500mbit or 4gbit")
    return float(match[1]) * UNITS[match[2]]


def program(name: str) -> str:
    found = shutil.which(name, path=PATHS)
    if found is None:
        raise ClusterUnavailable(f"the program {name!r} is missing; install the package {PACKAGES[name]}")
    return found


def call(name: str, *arguments: str) -> str:
    return subprocess.run([program(name), *arguments], capture_output=True, text=True, check=True).stdout


# ---- what the machine allows


def prepare() -> None:
    """Makes sure that the machine can hold a cluster, installing iproute2 where it is missing."""
    if os.geteuid() != 0:
        raise ClusterUnavailable(f"network namespaces need root and this is user {os.geteuid()}; run it with sudo")
    missing = sorted({package for name, package in PACKAGES.items() if shutil.which(name, path=PATHS) is None})
    if missing:
        _install(missing)
    probe = own_name("probe")
    try:
        call("ip", "netns", "add", probe)
        call("ip", "-n", probe, "link", "add", "switch", "type", "bridge")
        call("ip", "-n", probe, "link", "add", "here", "type", "veth", "peer", "name", "there")
        _shape(probe, "here", 1e9)
    except subprocess.CalledProcessError as error:
        raise ClusterUnavailable(
            f"`{' '.join(error.cmd)}` is not permitted here ({error.stderr.strip()}); "
            "in a container, start it with --privileged"
        ) from None
    finally:
        remove(probe)


def _install(packages: list[str]) -> None:
    remedy = f"install {' and '.join(packages)} with the system's package manager"
    apt = shutil.which("apt-get", path=PATHS)
    if apt is None:
        raise ClusterUnavailable(f"programs are missing and there is no apt-get; {remedy}")
    options = ("-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::http::Timeout=20", "-qq", "-y")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (("update",), ("install", "--no-install-recommends", *packages)):
        done = subprocess.run([apt, *options, *arguments], capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ClusterUnavailable(f"apt-get {arguments[0]} failed ({last}); {remedy}")


# ---- names, see [Note: Names]


def started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()  # the name before may contain anything
    return None if state in "ZX" else int(fields[18])


def own_name(name: str) -> str:
    return f"osdp-{os.getpid()}-{started(os.getpid())}-{name}"


def leftovers() -> Iterator[str]:
    """Namespaces of processes that are gone."""
    for entry in sorted(NETNS.iterdir()) if NETNS.is_dir() else ():
        if is_leftover(entry.name):
            yield entry.name


def is_leftover(name: str) -> bool:
    """Whether it is a name of ours, given by a process that is gone."""
    match = NAME.match(name)
    return match is not None and started(int(match["pid"])) != int(match["start"])


# ---- namespaces


def make_switch(switch: str) -> None:
    _make_namespace(switch)
    call("ip", "-n", switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
    call("ip", "-n", switch, "link", "set", "switch", "mtu", str(MTU), "up")


def make_host(host: str, *, number: int, switch: str, across: float | None, node: float | None) -> None:
    """A namespace with an address, joined to the switch; rates in bits a second."""
    _make_namespace(host)
    port = f"port{number}"
    call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host)
    for namespace, device in ((switch, port), (host, DEVICE)):
        # No IPv6 address, or gloo may choose it.
        call("ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "addrgenmode", "none")
        if across is not None:  # each end limits what it sends, so the host is limited in both directions
            _shape(namespace, device, across)
    call("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    call("ip", "-n", host, "address", "add", f"{address(number)}/{SUBNET.prefixlen}", "dev", DEVICE)
    call("ip", "-n", host, "link", "set", DEVICE, "up")
    if node is not None:
        _shape(host, "lo", node)


def address(number: int) -> str:
    return str(SUBNET[number + 1])


def _make_namespace(name: str) -> None:
    call("ip", "netns", "add", name)
    call("ip", "-n", name, "link", "set", "lo", "up")
    # Whatever the machine prefers for the internet (BBR paces and probes by itself); others may be forbidden in here.
    call("ip", "netns", "exec", name, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")


def _shape(namespace: str, device: str, rate: float) -> None:
    burst = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_SECONDS))
    bucket = ("rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MILLISECONDS}ms")
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def processes(namespace: str) -> list[int]:
    done = subprocess.run([program("ip"), "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def kill_all(namespace: str, *, wait_seconds: float = 5.0) -> None:
    """Ends whatever runs in the namespace, and waits until it is gone."""
    deadline = time.monotonic() + wait_seconds
    while (found := processes(namespace)) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def remove(namespace: str) -> None:
    """Deletes the namespace with its processes and links; nothing happens if there is none."""
    if (NETNS / namespace).exists():
        kill_all(namespace)
        subprocess.run([program("ip"), "netns", "delete", namespace], capture_output=True)
