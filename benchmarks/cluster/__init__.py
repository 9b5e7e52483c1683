"""A cluster on one machine: network namespaces as hosts, a shaped network between them, real ranks in them.

Two levels exist: ranks of a host meet on its loopback, which is fast, and hosts meet over links of a chosen rate. It
shows how a program behaves on a slow network; it has the machine's cores, however many hosts there are. With
`devices=True` each rank computes on a share of them of its own, as on a device (devices.py).

    with SimulatedCluster(hosts=4, ranks_per_host=1, across="500mbit") as cluster:
        results = cluster.run([sys.executable, "train.py"], timeout=600)

From the shell: `python -m benchmarks.cluster --hosts 4 --ranks-per-host 1 --across 500mbit -- python train.py`.
It needs Linux, root, and the programs of iproute2.
"""

from __future__ import annotations

from .network import ClusterUnavailable, bits_per_second, prepare
from .ranks import ClusterTimeout, RankResult, first_failure
from .simulated import SimulatedCluster

__all__ = [
    "ClusterTimeout",
    "ClusterUnavailable",
    "RankResult",
    "SimulatedCluster",
    "bits_per_second",
    "first_failure",
    "prepare",
]
