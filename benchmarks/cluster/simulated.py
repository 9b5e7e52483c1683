"""A simulated cluster: its network while the context lasts, and commands run on it as torchrun runs them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from . import network
from .devices import Devices
from .ranks import OnLine, RankResult, Start, first_failure, run_ranks

MASTER_PORT = 29500  # free in every cluster: its namespaces are its own
_numbers = count()  # of the clusters of this process


class SimulatedCluster:
    """`hosts` × `ranks_per_host` ranks; `across` is the rate of each host's link, `node` that of its loopback.

    Rates are texts like `500mbit`, None where nothing is limited. A host's link carries its rate in each direction; a
    loopback has one direction, which all ranks of the host share. With `devices` each rank computes on a share of the
    CPUs of its own; see [Note: Devices] in benchmarks.cluster.devices.
    """

    def __init__(
        self,
        *,
        hosts: int,
        ranks_per_host: int = 1,
        across: str | None = "500mbit",
        node: str | None = None,
        devices: bool = False,
    ) -> None:
        if hosts < 1 or ranks_per_host < 1:
            raise ValueError(f"{hosts} hosts of {ranks_per_host} ranks; at least 1 of each is needed")
        self.hosts, self.ranks_per_host, self.across, self.node = hosts, ranks_per_host, across, node
        self._across = None if across is None else network.bits_per_second(across)
        self._node = None if node is None else network.bits_per_second(node)
        prefix = f"{next(_numbers)}-"
        self._switch = network.own_name(f"{prefix}switch")
        self._hosts = [network.own_name(f"{prefix}host{host}") for host in range(hosts)]
        self._devices = Devices(network.own_name(f"{prefix}device"), self.world_size) if devices else None

    def __enter__(self) -> SimulatedCluster:
        network.prepare()
        for leftover in network.leftovers():
            network.remove(leftover)
        try:
            network.make_switch(self._switch)
            for number, host in enumerate(self._hosts):
                network.make_host(host, number=number, switch=self._switch, across=self._across, node=self._node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the cluster and removes its network; may be called again."""
        for namespace in (*self._hosts, self._switch):
            network.remove(namespace)
        if self._devices is not None:
            self._devices.close()

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
    ) -> list[RankResult]:
        """Runs the command once for each rank, `timeout` seconds at most; the results are in the order of ranks.

        When a rank fails, the others are killed. `env` is added to the environment, and what it sets stays set.
        """
        starts = [self._start(rank, command, env or {}) for rank in range(self.world_size)]
        try:
            return run_ranks(starts, timeout=timeout, on_line=on_line, devices=self._devices)
        finally:
            for host in self._hosts:  # what ranks left running, such as workers that load data
                network.kill_all(host)
            if self._devices is not None:
                self._devices.close()

    def cut(self, host: int) -> None:
        """Takes a host's link away: packets are lost from now on, and the other hosts are told nothing."""
        network.call("ip", "-n", self._hosts[host], "link", "set", network.DEVICE, "down")

    def measured(self, command: Sequence[str], *, timeout: float, on_line: OnLine | None = None) -> Any:
        """What rank 0 prints last, read as JSON; where a rank fails, the program ends with what that one said."""
        results = self.run(command, timeout=timeout, on_line=on_line)
        failed = first_failure(results)
        if failed is not None:
            raise SystemExit(f"rank {failed.rank} failed:\n{failed.stderr}")
        return json.loads(results[0].stdout.splitlines()[-1])

    def _start(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> Start:
        host, local = divmod(rank, self.ranks_per_host)
        # Where this process is killed without a chance to clean up, its ranks die with it.
        enter = (network.program("setpriv"), "--pdeathsig", "KILL", network.program("ip"), "netns", "exec")
        environment = {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns about every host that has an address but no name
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": network.DEVICE,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "LOCAL_RANK": str(local),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "GROUP_RANK": str(host),
            **env,
        }
        return Start(rank, host, (*enter, self._hosts[host], *command), environment)
