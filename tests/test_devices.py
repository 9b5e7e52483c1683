"""The catalogue is complete, sane and sourced; names and sizes are read as people write them."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.cluster import DTYPES, Device, device, devices, format_bytes, parse_bytes
from osdp.errors import UsageError

GIB = 1024**3
NAMES = [each.name for each in devices()]
WITHOUT_BF16 = {"RTX-TITAN", "RTX-2080Ti", "V100-16GB", "V100-32GB", "T4", "CPU"}


def test_catalogue_lists_the_promised_devices() -> None:
    promised = "RTX-TITAN RTX-2080Ti RTX-3090 RTX-4090 V100-16GB V100-32GB T4 L4 L40S A10 A100-40GB A100-80GB"
    promised += " H100-80GB H200 B200 MI250X MI300X CPU"
    missed = "RTX-A6000 RTX-6000-Ada L40 H100-PCIe H20 GH200 B300 MI325X Gaudi-3"
    assert set(f"{promised} {missed}".split()) == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("one", devices(), ids=NAMES)
def test_every_device_is_complete_and_sourced(one: Device) -> None:
    assert set(one.peak_flops) == set(DTYPES)
    host = set() if one.is_cpu else {"host", "host_link"}
    assert set(one.source) == {"memory", "flops", "bandwidth", "node_link", "network", *host}
    assert one.knows_host is not one.is_cpu
    assert all(len(text) > 10 for text in one.source.values())
    assert one.node_link.name
    assert one.network.name
    assert 1e-7 < one.kernel_seconds < 1e-4
    assert 4 * GIB < one.memory_bytes < 400 * GIB


@pytest.mark.parametrize("one", devices(), ids=NAMES)
def test_speeds_are_in_their_order(one: Device) -> None:
    """Memory beats the node's link, that beats the network's share; narrow types are not slower."""
    assert one.memory_bytes_per_second > one.node_link.bytes_per_second > one.network.bytes_per_second / 8
    assert one.node_link.latency_seconds < one.network.latency_seconds
    assert one.peak_flops["fp32"] <= one.peak_flops["tf32"] <= one.peak_flops["bf16"] <= one.peak_flops["fp16"]
    # A dense figure is never more than 32 times the plain fp32 rate; a sparse one of these devices often is.
    assert one.peak_flops["fp16"] <= 32 * one.peak_flops["fp32"]


@pytest.mark.parametrize("one", devices(), ids=NAMES)
def test_bf16_without_units_runs_at_the_fp32_rate(one: Device) -> None:
    assert one.accelerates("bf16") is (one.name not in WITHOUT_BF16)
    if one.name in WITHOUT_BF16:
        assert one.matmul_seconds(1e12, "bf16") == one.matmul_seconds(1e12, "fp32")


def test_every_device_overlaps_and_only_the_cpu_reserves_nothing() -> None:
    assert all(each.overlap for each in devices())
    assert [each.name for each in devices() if each.is_cpu] == ["CPU"]
    assert [each.name for each in devices() if each.reserve_fraction == 0] == ["CPU"]


def test_a_device_says_whether_its_speeds_were_calibrated() -> None:
    """Those of A100 and H100 were, on published runs; profiles say 'measured' (test_profile.py)."""
    calibrated = [each.name for each in devices() if each.basis == "calibrated"]
    assert calibrated == ["A100-40GB", "A100-80GB", "H100-80GB"]
    assert {each.basis for each in devices()} == {"calibrated", "data sheet"}
    assert device("H100-80GB").to_dict()["basis"] == "calibrated"


def test_accelerators_price_kernels_by_kind_and_the_cpu_by_one_rule() -> None:
    assert [each.name for each in devices() if not each.attention_efficiency] == ["CPU"]
    for one in devices():
        assert one.attention_efficiency < one.matmul_efficiency
    cpu = device("CPU")
    assert cpu.matmul_traffic == cpu.speed_spread == cpu.busy_fraction == cpu.context_bytes == 0


def test_a_newer_attention_kernel_is_faster_and_an_unknown_one_is_refused() -> None:
    for one in devices():
        rates = list(one.attention_rates.values())
        assert rates[:2] == sorted(rates[:2])  # flash-1, flash-2
        assert one.attention_efficiency == one.attention_rates.get(one.attention, 0.0)
    h100 = device("H100-80GB")
    assert [h100.with_attention(kernel).attention_efficiency for kernel in ("flash-1", "cudnn")] == [0.191, 0.53]
    assert h100.attention == device("A100-80GB").attention == "flash-2"
    with pytest.raises(UsageError, match=r"^V100-32GB has no rate for attention 'flash-2'; those it has: efficient$"):
        device("V100-32GB").with_attention("flash-2")


def test_dense_figures_of_the_datasheets() -> None:
    assert device("A100-80GB").peak_flops["bf16"] == 312e12
    assert device("H100-80GB").peak_flops["bf16"] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert device("V100-32GB").peak_flops["fp16"] == 125e12
    assert device("MI250X").peak_flops["bf16"] == pytest.approx(383e12 / 2)
    assert 79 * GIB < device("A100-80GB").memory_bytes < 80 * GIB


def test_times_at_stated_efficiencies() -> None:
    a100 = device("A100-80GB")
    assert a100.matmul_seconds(312e12 * 0.858, "bf16") == pytest.approx(1.0)
    assert a100.matmul_seconds(19.5e12 * 0.858, "fp32") == pytest.approx(1.0)
    assert a100.attention_seconds(312e12 * 0.58, "bf16") == pytest.approx(1.0)
    assert a100.memory_seconds(2039e9 * 0.85) == pytest.approx(1.0)
    with pytest.raises(UsageError, match=r"dtype 'fp8' is not known; use one of fp32, tf32, bf16, fp16"):
        a100.matmul_seconds(1.0, "fp8")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100_80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("nvidia a100 80gb", "A100-80GB"),
        ("NVIDIA_A100_80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("Tesla T4", "T4"),
        ("TITAN RTX", "RTX-TITAN"),
        ("AMD Instinct MI300X", "MI300X"),
        ("A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Intel Gaudi 3", "Gaudi-3"),
        ("cpu", "CPU"),
    ],
)
def test_names_are_forgiving(written: str, name: str) -> None:
    assert device(written).name == name


def test_an_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(UsageError) as caught:
        device("A100")
    message = str(caught.value)
    assert "device 'A100' is not in the catalogue" in message
    assert "A100-40GB" in message
    assert "A100-80GB" in message
    assert message.endswith("osdp devices lists them")


def test_a_name_like_nothing_still_gets_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"^device 'qqqq' is not in the catalogue; osdp devices lists them$"):
        device("qqqq")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0 but must be a whole number of at least 1; correct it for device 'T4'"),
        ({"matmul_efficiency": 1.2}, "matmul_efficiency is 1.2 but must be a number of at most 1"),
        (
            {"memory_bytes_per_second": math.inf},
            r"memory_bytes_per_second is inf but must be a number of at most 1e\+18",
        ),
        ({"peak_flops": {"fp32": 1e12}}, "lacks tf32, bf16, fp16"),
        ({"reserve_fraction": 1.0}, "reserve_fraction is 1.0 but must be a number below 1"),
        ({"attention_efficiency": -0.1}, "attention_efficiency is -0.1 but must be a number of at least 0"),
        ({"attention": "flash-9"}, "attention 'flash-9' is not known; use one of flash-1, flash-2"),
        ({"context_bytes": 1.5}, "context_bytes is 1.5 but must be"),
        ({"basis": "guess"}, "basis 'guess' is not known; use one of measured, calibrated, data sheet"),
    ],
)
def test_impossible_figures_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(device("T4"), **change)


def test_a_device_is_a_value() -> None:
    one = device("T4")
    assert dataclasses.replace(one) == one
    assert hash(dataclasses.replace(one)) == hash(one)
    assert dataclasses.replace(one, peak_flops={**one.peak_flops, "bf16": 9e12}) != one


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * GIB),
        ("80GB", 80 * 10**9),
        ("512 MiB", 512 * 1024**2),
        ("1.5TiB", 1536 * GIB),
        ("0.1GB", 10**8),
        (" 4096 ", 4096),
        (4096, 4096),
        ("2kb", 2000),
        ("1e3 MB", 10**9),
        ("1.9B", 1),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8G", "'8G' has an unknown unit; use B, KiB"),
        ("8 apples", "has an unknown unit"),
        ("-8GiB", "'-8GiB' is less than one byte; give a positive size"),
        ("0GiB", "is less than one byte"),
        (0, "memory size 0 is less than one byte"),
        (-1, "is less than one byte"),
        ("", "'' is not a number with a unit; write it as '40GiB'"),
        ("nan GiB", "is not a number with a unit"),
        ("9" * 5000, "is not a number with a unit"),
        (True, "True is not a size"),
        (8.5, "8.5 is not a size"),
    ],
)
def test_bad_sizes(text: str | int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_bytes(text)


@given(st.integers(1, 2**60))
def test_bytes_survive_both_ways(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count}B") == count


@given(st.integers(1024, 2**58))
def test_printed_sizes_read_back_within_their_last_digit(count: int) -> None:
    printed = format_bytes(count)
    unit = parse_bytes("1" + printed.split()[1])
    assert abs(parse_bytes(printed) - count) <= 0.05 * unit * (1 + 1e-9) + 1
    assert 1.0 <= float(printed.split()[0]) < 1024


def test_printed_sizes() -> None:
    assert format_bytes(int(41.2 * GIB)) == "41.2 GiB"
    assert format_bytes(-int(9.1 * GIB)) == "-9.1 GiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(GIB - 1) == "1.0 GiB"


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, osdp.cluster as c; c.devices(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
