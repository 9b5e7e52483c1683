"""Clusters read back as written; collectives cost what the ring formulas, or the measurements, say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.cluster import GROUPS, KINDS, Cluster, Device, Link, Measured, device, devices, wire_bytes
from osdp.engine import ASYNC_GLOO, STOCK
from osdp.errors import UsageError

GIB = 1024**3
NODE = Link(100e9, 2e-6)
NETWORK = Link(40e9, 10e-6)

links = st.builds(Link, st.floats(1e3, 1e13), st.floats(0, 1.0), st.text(max_size=8))
measurements = st.lists(
    st.builds(Measured, st.sampled_from(KINDS), st.sampled_from(GROUPS), st.floats(0, 1.0), st.floats(1e3, 1e13)),
    unique_by=lambda each: (each.kind, each.group),
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
clusters = st.builds(
    Cluster.of,
    st.builds(lambda one, note: dataclasses.replace(one, note=note), st.sampled_from(devices()), names),
    nodes=st.integers(1, 4096),
    devices_per_node=st.integers(1, 16),
    memory=st.none() | st.integers(1000, 2**42),
    node_link=st.none() | links,
    network=st.none() | links,
    measured=measurements,
    overlap=st.none() | st.booleans() | st.floats(0, 1),
    reserve_fraction=st.none() | st.floats(0, 0.99),
    name=names,
)


def small(nodes: int, devices_per_node: int, *measured: Measured) -> Cluster:
    return Cluster.of(
        "CPU",
        nodes=nodes,
        devices_per_node=devices_per_node,
        node_link=NODE,
        network=NETWORK,
        measured=measured,
    )


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [
        ("2x8xA100-80GB", 2, 8, "A100-80GB"),
        ("8xRTX-TITAN", 1, 8, "RTX-TITAN"),
        ("A100-80GB", 1, 1, "A100-80GB"),
        ("16 x 8 x nvidia h100", 16, 8, "H100-80GB"),
        ("4X8Xmi250x", 4, 8, "MI250X"),
    ],
)
def test_words(text: str, nodes: int, per_node: int, name: str) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (nodes, per_node, name)
    assert cluster.world_size == nodes * per_node


@given(st.integers(1, 1 << 14), st.integers(1, 64), st.sampled_from(devices()))
def test_a_word_reads_back(nodes: int, per_node: int, one: Device) -> None:
    cluster = Cluster.of(one, nodes=nodes, devices_per_node=per_node)
    assert Cluster.parse(cluster.word) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x8xA100-80GB", "nodes is 0 but must be a whole number of at least 1; correct the cluster"),
        ("0xA100-80GB", "devices_per_node is 0"),
        ("2x8xA100-80", "device 'A100-80' is not in the catalogue; closest: A100-80GB"),
        ("  ", "the cluster is an empty text; write it as '2x8xA100-80GB'"),
        ("8x", "device '8x' is not in the catalogue"),
    ],
)
def test_bad_words(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster.parse(text)


def test_limit_is_the_memory_without_the_reserve() -> None:
    assert Cluster.of("CPU", memory="8GiB").limit_bytes == 8 * GIB
    assert Cluster.of("A100-80GB", memory=1000, reserve_fraction=0.25).limit_bytes == 750


def test_the_reserve_of_an_accelerator_has_its_lines() -> None:
    """Context, workspaces, a part for fragments, and buffers of one communicator on a node and three across nodes."""
    one = device("A100-80GB")
    plain, node, nodes = (Cluster.of(one, nodes=n, devices_per_node=d) for n, d in ((1, 1), (1, 8), (2, 8)))
    assert set(plain.reserve) == {"context", "workspaces", "fragmentation"}
    assert node.reserve["communicators"] * 3 == nodes.reserve["communicators"] == 3 * one.communicator_bytes
    for cluster in (plain, node, nodes):
        fixed = sum(size for name, size in cluster.reserve.items() if name != "fragmentation")
        assert cluster.limit_bytes == int((one.memory_bytes - fixed) * (1 - one.reserve_fraction))
        assert cluster.limit_bytes + sum(cluster.reserve.values()) == cluster.total_bytes == one.memory_bytes
    half = dataclasses.replace(node, memory_bytes=one.memory_bytes // 2)
    assert half.limit_bytes == pytest.approx(node.limit_bytes / 2, rel=1e-6)
    assert Cluster.of("CPU", devices_per_node=4).reserve == {}


@given(clusters, st.integers(1, 2**42))
def test_a_cluster_with_a_limit_has_no_more_memory_than_that_takes(cluster: Cluster, limit: int) -> None:
    assert 0 <= cluster.with_limit(limit).limit_bytes - limit <= 4  # every line of the reserve is rounded


def test_overlap_is_the_devices_unless_said() -> None:
    assert Cluster.of("A100-80GB").overlap
    assert Cluster.of("CPU").overlap
    assert not Cluster.of("CPU", overlap=False).overlap
    assert not dataclasses.replace(Cluster.of("A100-80GB"), overlap=False).overlap


def test_group_sizes() -> None:
    cluster = small(3, 4)
    assert [cluster.group_size(group) for group in ("world", "node", "across")] == [12, 4, 3]
    with pytest.raises(UsageError, match="group 'rack' is not known; use one of world, node, across"):
        cluster.group_size("rack")


# Calculated by hand for S = 8e9 bytes, 4 nodes of 8, links as above:
#   node    latency 7 * 2e-6 = 14e-6;        7/8 * 8e9 = 7e9 over 100e9
#   across  latency 2 * 10e-6 = 20e-6;       3/4 * 8e9 = 6e9 over 40e9 / 8 = 5e9
#   world   latency 14e-6 + 20e-6 = 34e-6;   31/32 * 8e9 = 7.75e9 over min(100e9, 40e9)
@pytest.mark.parametrize(
    ("group", "seconds"),
    [("node", 14e-6 + 0.07), ("across", 20e-6 + 1.2), ("world", 34e-6 + 0.19375)],
)
def test_ring_figures(group: str, seconds: float) -> None:
    cluster = small(4, 8)
    assert cluster.collective_seconds("all_gather", group, 8e9) == pytest.approx(seconds, rel=1e-12)
    assert cluster.collective_seconds("reduce_scatter", group, 8e9) == pytest.approx(seconds, rel=1e-12)
    assert cluster.collective_seconds("all_reduce", group, 8e9) == pytest.approx(2 * seconds, rel=1e-12)


def test_a_slow_node_link_holds_up_the_world_ring() -> None:
    cluster = dataclasses.replace(small(2, 2), node_link=Link(1e9, 0.0), network=Link(4e9, 0.0))
    assert cluster.collective_seconds("all_gather", "world", 4e9) == pytest.approx(3.0)


def test_one_device_a_node_never_uses_the_node_link() -> None:
    cluster = dataclasses.replace(small(2, 1), node_link=Link(1e9, 1.0), network=Link(4e9, 0.0))
    assert cluster.collective_seconds("all_gather", "world", 8e9) == pytest.approx(1.0)


def test_latency_grows_with_the_logarithm_of_nodes() -> None:
    latency = [small(nodes, 1).collective_seconds("all_gather", "world", 0) for nodes in (1, 2, 3, 4, 5, 2048)]
    assert latency == pytest.approx([0, 10e-6, 20e-6, 20e-6, 30e-6, 110e-6])


@given(st.sampled_from(KINDS), st.integers(1, 64), st.floats(0, 1e12), measurements)
def test_names_of_the_same_ranks_cost_the_same(kind: str, count: int, size: float, measured: list[Measured]) -> None:
    one_node = small(1, count, *[each for each in measured if each.group == "world"])
    assert one_node.collective_seconds(kind, "world", size) == one_node.collective_seconds(kind, "node", size)
    assert one_node.collective_seconds(kind, "across", size) == 0.0
    spread = small(count, 1, *[each for each in measured if each.group == "across"])
    assert spread.collective_seconds(kind, "world", size) == spread.collective_seconds(kind, "across", size)
    assert spread.collective_seconds(kind, "node", size) == 0.0


@given(clusters, st.sampled_from(KINDS), st.sampled_from(GROUPS), st.floats(1, 1e12))
def test_more_bytes_never_cost_less(cluster: Cluster, kind: str, group: str, size: float) -> None:
    assert 0 <= cluster.collective_seconds(kind, group, size) <= cluster.collective_seconds(kind, group, 2 * size)


@given(st.integers(2, 64), st.integers(2, 8), st.floats(1e6, 1e12))
def test_hierarchy_pays_within_the_node(nodes: int, per_node: int, size: float) -> None:
    """Group sharding's promise: in-node gathers beat world gathers when the network is the slower link."""
    cluster = small(nodes, per_node)
    node, world = (cluster.collective_seconds("all_gather", group, size) for group in ("node", "world"))
    assert node < world


def test_a_measurement_replaces_latency_and_rate_of_its_kind_and_group_only() -> None:
    modelled = small(2, 4)
    cluster = small(2, 4, Measured("all_reduce", "world", 1e-3, 7e9))
    # 2 * 7/8 * 8e9 = 14e9 wire bytes at 7e9 a second, and the latency once.
    assert cluster.collective_seconds("all_reduce", "world", 8e9) == pytest.approx(2.001)
    for kind, group in [("all_gather", "world"), ("all_reduce", "node"), ("all_reduce", "across")]:
        assert cluster.collective_seconds(kind, group, 8e9) == modelled.collective_seconds(kind, group, 8e9)


def test_wire_bytes_of_a_ring() -> None:
    assert wire_bytes("all_gather", 4, 8e9) == wire_bytes("reduce_scatter", 4, 8e9) == 6e9
    assert wire_bytes("all_reduce", 4, 8e9) == 12e9
    assert wire_bytes("all_reduce", 1, 8e9) == 0


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("broadcast", 1.0, "collective 'broadcast' is not known; use one of all_gather"),
        ("all_gather", -1.0, "a collective over -1.0 bytes is impossible"),
        ("all_gather", float("nan"), "a collective over nan bytes is impossible"),
    ],
)
def test_impossible_collectives(kind: str, size: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small(1, 2).collective_seconds(kind, "world", size)


def test_a_collective_measured_twice_is_refused() -> None:
    entry = Measured("all_gather", "world", 0.0, 1e9)
    with pytest.raises(UsageError, match="all_gather in world is measured twice"):
        small(1, 2, entry, entry)


def test_the_engine_is_a_field_and_stock_fsdp2_hides_nothing_on_cpus() -> None:
    usual, stock = (Cluster.of("CPU", nodes=2, devices_per_node=2, engine_name=name) for name in (None, "fsdp2"))
    assert (usual.engine, stock.engine, Cluster.parse("A100-80GB").engine) == (ASYNC_GLOO, STOCK, STOCK)
    assert usual.has_two_levels and not stock.has_two_levels
    assert (usual.overlap > 0, stock.overlap) == (True, 0.0)
    for cluster in (usual, stock):
        assert cluster.to_dict()["engine"] == cluster.engine.name
        assert Cluster.from_dict(cluster.to_dict()) == cluster
    table = {key: value for key, value in stock.to_dict().items() if key != "overlap"}
    assert Cluster.from_dict(table) == stock
    with pytest.raises(UsageError, match="engine"):
        Cluster.from_dict({**table, "engine": "mpi"})


@given(clusters)
def test_dict_and_json_round_trip(cluster: Cluster) -> None:
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


@given(clusters)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(cluster.to_toml(), encoding="utf-8", newline="")
    assert Cluster.parse(str(path)) == cluster


def test_awkward_texts_survive_toml(tmp_path: Path) -> None:
    cluster = Cluster.of("CPU", name='"quoted" \\ \x7f \x00 \n \u2028 \U0001f600 # not a comment')
    path = tmp_path / "awkward.toml"
    path.write_text(cluster.to_toml(), encoding="utf-8", newline="")
    assert Cluster.from_toml(path) == cluster


def test_a_written_cluster_does_not_depend_on_the_catalogue() -> None:
    table = Cluster.of("T4").to_dict()
    table["device"]["name"] = "not in any catalogue"
    table["device"]["memory_bytes"] = 123 * GIB
    assert Cluster.from_dict(table).device.memory_bytes == 123 * GIB


FILE = """
name = "lab"
nodes = 2
devices_per_node = 4
memory = "40GiB"
overlap = false
reserve_fraction = 0.1

[device]
like = "a100-80gb"
name = "A100-PCIe"
peak_flops = { bf16 = 300e12 }

[network]
bytes_per_second = 25e9
latency_seconds = 12e-6

[[collective]]
kind = "all_gather"
group = "world"
latency_seconds = 45e-6
bytes_per_second = 20e9
"""


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(FILE)
    cluster = Cluster.parse(str(path))
    base = device("A100-80GB")
    assert (cluster.label, cluster.world_size, cluster.limit_bytes) == ("lab", 8, int(40 * GIB * 0.9))
    assert cluster.device == dataclasses.replace(base, name="A100-PCIe", peak_flops={**base.peak_flops, "bf16": 300e12})
    assert cluster.node_link == base.node_link
    assert cluster.network == Link(25e9, 12e-6)
    assert cluster.measured == (Measured("all_gather", "world", 45e-6, 20e9),)
    assert not cluster.overlap


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 2", "noodes = 2", "cluster has an unknown field 'noodes'; did you mean 'nodes'"),
        ("nodes = 2", "zzz = 2", "cluster has an unknown field 'zzz'; known fields are name, nodes"),
        ("nodes = 2", 'nodes = "2"', "cluster.nodes is '2' but must be a whole number; correct it"),
        ("nodes = 2", "nodes = true", "cluster.nodes is True but must be a whole number"),
        ("nodes = 2", "nodes = 0", "cluster.nodes is 0 but must be a whole number of at least 1"),
        (
            "nodes = 2",
            "nodes = 99999999999999999999",
            "cluster.nodes is 9+ but must be a whole number of at most 1048576",
        ),
        (
            "nodes = 2",
            "nodes = 2\nunit_overhead_seconds = nan",
            "cluster.unit_overhead_seconds is nan but must be a number",
        ),
        ("nodes = 2", "nodes = 1000000", "the cluster has 4,000,000 devices; give at most 1,048,576"),
        ("nodes = 2", "nodes = ", "is not valid TOML"),
        ('"40GiB"', '"40G"', "memory size '40G' has an unknown unit"),
        ("overlap = false", "overlap = 2", "cluster.overlap is 2 but must be a number of at most 1"),
        ("overlap = false", "memory_bytes = 5", "both 'memory' and 'memory_bytes' are given"),
        ('like = "a100-80gb"', "", "cluster.device has no field 'memory_bytes'"),
        (
            'like = "a100-80gb"',
            'like = "a100-80"',
            "device 'a100-80' is not in the catalogue; closest: A100-80GB",
        ),
        (
            "bf16 = 300e12",
            "bf61 = 300e12",
            "in the peak_flops of device 'A100-PCIe', dtype 'bf61' is not known; use one of fp32, tf32, bf16",
        ),
        ("bytes_per_second = 25e9", "", "cluster.network has no field 'bytes_per_second'"),
        (
            "bytes_per_second = 25e9",
            "bytes_per_second = -1",
            "cluster.network.bytes_per_second is -1 but must be a number of at least 1",
        ),
        (
            "bytes_per_second = 25e9",
            "bytes_per_second = 1e-320",
            "bytes_per_second is 1e-320 but must be a number of at",
        ),
        (
            "bytes_per_second = 25e9",
            "bytes_per_second = inf",
            "bytes_per_second is inf but must be a number of at most",
        ),
        ("[[collective]]", "[collective]", "cluster.collective is .* but must be a list"),
        ('"all_gather"', '"gather"', "collective kind 'gather' is not known; use one of all_gather"),
        ("latency_seconds = 45e-6", "latency = 1", r"cluster.collective\[0\] has no field 'latency_seconds'"),
        (
            "kind =",
            "colour = 1\nkind =",
            r"cluster.collective\[0\] has an unknown field 'colour'; known fields are kind",
        ),
    ],
)
def test_bad_files_name_file_key_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    path = tmp_path / "lab.toml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as caught:
        Cluster.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_missing_device(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no.toml: there is no such file; give a cluster file in TOML or a word"):
        Cluster.parse(str(tmp_path / "no.toml"))
    with pytest.raises(UsageError, match="cluster has no field 'device'; correct it"):
        Cluster.from_dict({"nodes": 1})
    with pytest.raises(UsageError, match=r"cluster is \[\] but must be a table"):
        Cluster.from_dict([])


def test_the_documented_files_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "devices.md").read_text(encoding="utf-8")
    whole, table = [part.split("```")[0] for part in page.split("```toml\n")[1:]]
    path = tmp_path / "docs.toml"
    path.write_text(whole, encoding="utf-8")
    assert Cluster.from_toml(path).word == "2x8xA100-80GB"
    path.write_text(table, encoding="utf-8")
    assert Cluster.from_toml(path).device.node_link == Link(22e9, 5.7e-6)
    assert Cluster.from_toml(path).node_link == Link(22e9, 5.7e-6)


def test_a_cluster_states_its_attention_kernel() -> None:
    """In a word of its file, in its device's table, or in a call; a stated efficiency is of no known kernel."""
    called = Cluster.of("A100-80GB", attention="flash-1")
    assert called == Cluster.parse("A100-80GB").with_attention("flash-1")
    for table in ({"device": "A100-80GB", "attention": "flash-1"}, {"device": called.device.to_dict()}):
        assert Cluster.from_dict(table) == called
    changed = {"like": "A100-80GB", "attention": "flash-1", "name": "A100-80GB"}
    assert Cluster.from_dict({"device": changed}) == called
    own = Cluster.from_dict({"device": {"like": "A100-80GB", "attention_efficiency": 0.4}}).device
    assert (own.attention, own.attention_efficiency) == ("", 0.4)
    more = {"like": "A100-80GB", "attention": "flash-3", "attention_rates": {"flash-3": 0.6}}
    assert Cluster.from_dict({"device": more}).device.attention_efficiency == 0.6
    with pytest.raises(
        UsageError, match=r"^A100-80GB has no rate for attention 'cudnn'; those it has: flash-1, flash-2"
    ):
        Cluster.from_dict({"device": "A100-80GB", "attention": "cudnn"})
