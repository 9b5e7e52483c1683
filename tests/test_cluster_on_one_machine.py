"""Claims: the simulated cluster has two levels, hosts at the asked rate and ranks of a host far faster; ranks see what
torchrun tells them; exit codes are gathered; a plan trains on it, over two levels, as in a single process; and nothing
is left behind, however a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from odd_models import Model, built
from trained import EVERY_MODE, Trained, same, three_plans, train

from benchmarks.cluster import ClusterTimeout, ClusterUnavailable, SimulatedCluster, first_failure, prepare
from benchmarks.cluster import network as net
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.check import measured_rates
from benchmarks.cluster.devices import COMPUTE, GROUPS

ROOT = Path(__file__).parent.parent
ENVIRONMENT = "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK GROUP_RANK OMP_NUM_THREADS"
SLEEP = (sys.executable, "-c", "import time; print('sleeping'); time.sleep(100)")


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    try:
        prepare()
    except ClusterUnavailable as error:
        pytest.skip(f"no cluster on this machine: {error}")


def _left_by(pid: int) -> list[str]:
    return [path.name for path in net.NETNS.iterdir() if path.name.startswith(f"osdp-{pid}-")]


def _alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if net.started(pid) is not None]


def _interfaces() -> set[str]:
    return {line.split(":")[1].strip() for line in net.call("ip", "-o", "link").splitlines()}


@pytest.fixture(autouse=True)
def _nothing_is_left(_possible: None) -> Iterator[None]:
    """Around every test, whatever it does."""
    before = _interfaces()
    yield
    assert _left_by(os.getpid()) == []
    assert _interfaces() == before


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- two levels


def test_hosts_meet_at_the_asked_rate_and_ranks_of_a_host_far_above() -> None:
    with SimulatedCluster(hosts=2, ranks_per_host=2, across="200mbit") as cluster:
        rates = {(rate.link, rate.collective): rate.best for rate in measured_rates(cluster, seconds=0.06)}
    asked = 200e6
    for link in ("across", "across, all ranks"):
        for collective in ("send", "all_reduce"):
            assert rates[link, collective] == pytest.approx(asked, rel=0.15), (link, collective)
        for collective in ("all_gather_into_tensor", "all_to_all_single"):  # gloo may take turns: see measure.py
            assert rates[link, collective] < 1.15 * asked, (link, collective)
    for collective in ("send", "all_gather_into_tensor", "all_reduce", "all_to_all_single"):
        assert rates["node", collective] > 3 * asked, collective


def test_a_host_receives_at_the_asked_rate_however_many_send_to_it() -> None:
    code = """if True:
        import os, socket, time
        address, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 4_000_000
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as server:
                peers = [server.accept()[0] for _ in range(2)]
            began = time.perf_counter()
            for peer in peers:
                peer.sendall(b"!")
            while peers:
                peers = [peer for peer in peers if peer.recv(1 << 20)]
            print(2 * size * 8 / (time.perf_counter() - began))
        while os.environ["RANK"] != "0":
            try:
                with socket.create_connection(address) as peer:
                    peer.recv(1)
                    peer.sendall(bytes(size))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    """
    with SimulatedCluster(hosts=3, across="200mbit") as cluster:
        rates = [float(cluster.run(_python(code), timeout=30)[0].stdout) for _ in range(3)]
    assert max(rates) == pytest.approx(200e6, rel=0.15)


# ---- ranks


def test_ranks_see_what_torchrun_tells_them() -> None:
    code = f"import os; print(*(os.environ[name] for name in {ENVIRONMENT.split()!r}), os.environ['MINE'])"
    with SimulatedCluster(hosts=2, ranks_per_host=2) as cluster:
        results = cluster.run(_python(code), env={"MINE": "yes"}, timeout=30)
    assert [result.stdout for result in results] == [
        f"10.77.0.1 29500 4 {rank} 2 {rank % 2} {rank // 2} 1 yes\n" for rank in range(4)
    ]
    assert [(result.rank, result.host, result.exit_code, result.stderr) for result in results] == [
        (rank, rank // 2, 0, "") for rank in range(4)
    ]


def test_two_clusters_at_once_have_the_same_addresses_and_do_not_meet() -> None:
    code = """if True:
        import os, socket, time
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as server:
                server.accept()[0].sendall(os.environ["NAME"].encode())
                time.sleep(0.5)  # the other cluster's rank 0 serves at the same time
        for _ in range(100 if os.environ["RANK"] == "1" else 0):
            try:
                print(socket.create_connection(address).recv(10).decode())
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    """
    with SimulatedCluster(hosts=2) as one, SimulatedCluster(hosts=2) as other, ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(cluster.run, _python(code), env={"NAME": name}, timeout=30)
            for name, cluster in (("one", one), ("other", other))
        ]
        assert [run.result()[1].stdout for run in runs] == ["one\n", "other\n"]


def test_a_rank_that_fails_ends_the_others_and_is_named_first() -> None:
    code = "import os, sys, time; r = int(os.environ['RANK']); sys.exit(7) if r == 2 else time.sleep(100)"
    began = time.monotonic()
    with SimulatedCluster(hosts=3) as cluster:
        results = cluster.run(_python(code), timeout=60)
        assert [result.exit_code for result in results] == [-signal.SIGKILL, -signal.SIGKILL, 7]
        failed = first_failure(results)
        assert failed is not None and failed.rank == 2
        assert [r.exit_code for r in cluster.run(["true"], timeout=30)] == [0, 0, 0]  # and it can go on
    assert time.monotonic() - began < 30


def test_ranks_that_are_late_are_killed_and_their_output_kept() -> None:
    with SimulatedCluster(hosts=2) as cluster, pytest.raises(ClusterTimeout, match=r"ranks \[0, 1\]") as raised:
        cluster.run(SLEEP, timeout=1.5)
    assert [(r.exit_code, r.stdout) for r in raised.value.results] == [(-signal.SIGKILL, "sleeping\n")] * 2


def test_what_a_rank_leaves_running_ends_with_the_run() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid)"
    with SimulatedCluster(hosts=1) as cluster:
        (result,) = cluster.run(_python(code), timeout=30)
        assert _alive([int(result.stdout)]) == []


def test_each_rank_computes_on_a_share_of_the_cpus_of_its_own() -> None:
    """The first thread of each rank is in a group that has its share; a thread that communicates is outside of it."""
    code = """
import json, os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
others = [each for each in os.listdir("/proc/self/task") if int(each) != os.getpid()]
def group(thread):
    with open(f"/proc/self/task/{thread}/cgroup") as file:
        return next(line.strip().rpartition(":")[2] for line in file if ":cpu:" in line)
until = time.monotonic() + 30
while (found := {group(each) for each in others}) == {group(os.getpid())} and time.monotonic() < until:
    time.sleep(0.05)
began, used = time.monotonic(), time.thread_time()
while time.monotonic() < began + 0.5:
    pass
print(json.dumps([group(os.getpid()), sorted(found), (time.thread_time() - used) / (time.monotonic() - began)]))
"""
    try:
        cluster = SimulatedCluster(hosts=1, ranks_per_host=2, devices=True)
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    with cluster:
        results = [json.loads(result.stdout) for result in cluster.run(_python(code), timeout=60)]
    expected = min(1.0, COMPUTE * (os.cpu_count() or 1) / 2)
    for own, others, used in results:
        assert others == ["/"]
        assert used < 1.2 * expected  # a busy machine gives less
        assert not (GROUPS / own.lstrip("/")).exists()
    assert len({own for own, *_ in results}) == 2


# ---- the command


def test_the_command_shows_rank_0_and_the_tail_of_the_rank_that_failed() -> None:
    code = "import os, sys; print('rank', os.environ['RANK']); sys.exit('broken' if os.environ['RANK'] == '1' else 0)"
    command = ["--hosts", "2", "--", *_python(code)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", *command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "rank 1" not in done.stdout
    assert "rank 1 ended with 1" in done.stderr and done.stderr.endswith("broken\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--across", "500", "--check"], "'500' is not a rate; write it as"),
        (["--hosts", "0", "--check"], "0 hosts of 1 ranks"),
        ([], "give either --check or a command"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert sentence in capsys.readouterr().err


def test_without_root_the_remedy_is_said() -> None:
    # Imported as root: another user may not be allowed to read the files.
    code = "import os, sys; from benchmarks.cluster.__main__ import main; os.setuid(65534); sys.exit(main(['--check']))"
    done = subprocess.run(_python(code), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: network namespaces need root and this is user 65534; run it with sudo\n"


# ---- training


def test_training_over_two_levels_equals_the_single_process(tmp_path: Path) -> None:
    plans = three_plans(Model, "2x2", splits=((3, 2), (1, 1)))
    assert {unit.mode for plan in plans for unit in plan.units} == set(EVERY_MODE)
    assert {unit.two_levels for plan in plans for unit in plan.units} == {True, False}
    for index, plan in enumerate(plans):
        plan.save(tmp_path / f"plan{index}")
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        import torch, osdp
        from odd_models import Model, built
        from trained import train
        torch.distributed.init_process_group("gloo")
        plans = [osdp.Plan.load(f"{tmp_path}/plan{{index}}") for index in range({len(plans)})]
        found = [train(osdp.parallelize(built(Model), plan)) for plan in plans]
        torch.save([(run.losses, run.gradients, run.weights) for run in found], "{tmp_path}/" + os.environ["RANK"])
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    """
    with SimulatedCluster(hosts=2, ranks_per_host=2, across="200mbit") as cluster:
        results = cluster.run([sys.executable, "-W", "ignore", *_python(code)[1:]], timeout=120)
    failed = first_failure(results)
    assert failed is None, failed.stderr
    truth = train(built(Model))
    for rank in range(cluster.world_size):
        for losses, gradients, weights in torch.load(tmp_path / str(rank)):
            same(Trained(losses, gradients, weights), truth)


# ---- nothing left behind


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.cluster", "--hosts", "2", "--", *SLEEP]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "[0/0] sleeping\n"
        namespaces = _left_by(process.pid)
        assert len(namespaces) == 3
        ranks: list[int] = []
        end = time.monotonic() + 20
        while len(ranks) < 2 and time.monotonic() < end:  # only one of them has said that it is there
            ranks = [pid for namespace in namespaces for pid in net.processes(namespace)]
        assert len(ranks) == 2
        process.send_signal(number)
        code = process.wait(timeout=20)
    if number == signal.SIGKILL:
        with SimulatedCluster(hosts=1):  # the next run finds and removes it
            pass
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + number
    assert _left_by(process.pid) == []
    assert _alive(ranks) == []
