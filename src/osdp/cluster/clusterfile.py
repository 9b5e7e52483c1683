"""Clusters as tables: the one form that plan files (JSON) and cluster files (TOML) share.

A cluster file, with everything but the first lines optional:

    name = "lab"
    nodes = 2
    devices_per_node = 8
    device = "A100-80GB"        # a catalogue name, or a [device] table below
    memory = "40GiB"            # of each device, if not the device's own
    reserve_fraction = 0.06     # of that memory, not planned with
    overlap = true              # communication runs beside compute; or the part of it that does, from 0 to 1
    visit_seconds = 0.0         # the host's time for a unit's forward, and for its backward
    exchange_seconds = 0.0      # the host's time for one gather or reduction, beside the collective's own
    tensor_seconds = 0.0        # the same for every parameter that is gathered or reduced
    copy_byte_seconds = 0.0     # for every byte copied beside a collective, beyond what the memory's rate says

    [node_link]                 # inside a node: per device and direction
    bytes_per_second = 240e9
    latency_seconds = 3.4e-6

    [network]                   # between nodes: per NODE and direction
    bytes_per_second = 160e9
    latency_seconds = 9.6e-6

    [[collective]]              # a measured price replaces the model's for this kind and group
    kind = "all_gather"         # all_gather, reduce_scatter, all_reduce
    group = "world"             # world, node, across
    latency_seconds = 45e-6     # of the whole call
    bytes_per_second = 150e9    # wire bytes of one rank per second
    busy_fraction = 0.1         # the part of its seconds that the computation beside it loses, beyond `overlap`

    [[optimizer]]               # a timed step replaces the model's for this optimizer
    name = "adamw"
    tensor_seconds = 20e-6      # for every tensor that a rank holds a part of
    byte_seconds = 2e-9         # for every byte of those

    [[stage]]                   # timed kernels replace the roofline wherever a model has the same ones
    signature = "5b2e..."
    name = "model.layers.0"
    batches = [1, 2, 4]
    forward_seconds = [0.01, 0.02, 0.04]
    backward_seconds = [0.02, 0.04, 0.08]

A device that is not in the catalogue, or differs from it, is a table; `like` starts from a catalogue device,
without it every figure is needed:

    [device]
    like = "A100-80GB"
    name = "A100-PCIe"
    memory_bytes_per_second = 1935e9
    peak_flops = { bf16 = 300e12 }
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osdp.cluster.device import DTYPES, Device, device
from osdp.cluster.form import Form
from osdp.cluster.link import Link, Measured
from osdp.cluster.timed import TimedOptimizer, TimedStage
from osdp.errors import UsageError

_LINK_KEYS = ("bytes_per_second", "latency_seconds", "name")
_COLLECTIVE_KEYS = ("kind", "group", "latency_seconds", "bytes_per_second", "busy_fraction")
_OPTIMIZER_KEYS = ("name", "tensor_seconds", "byte_seconds")
_STAGE_KEYS = ("signature", "name", "batches", "forward_seconds", "backward_seconds")
_DEVICE_KEYS = ("like", "memory", *(each.name for each in dataclasses.fields(Device)))
_CLUSTER_KEYS = (
    *("name", "nodes", "devices_per_node", "device", "memory", "memory_bytes", "reserve_fraction", "overlap"),
    *("visit_seconds", "exchange_seconds", "tensor_seconds", "copy_byte_seconds"),
    *("node_link", "network", "collective", "optimizer", "stage"),
)


def load_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, or an error that names it."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file; give a cluster file or a word such as '8xA100-80GB'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); give a readable UTF-8 file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not valid TOML ({error}); correct that line") from None


def read_cluster(table: object) -> dict[str, Any]:
    """The fields of a `Cluster`, from its table; links, overlap and reserve default to the device's."""
    form = Form(table, "", _CLUSTER_KEYS)
    entry = form.raw("device")
    chosen = device(entry) if isinstance(entry, str) else read_device(entry)
    return {
        "name": form.text("name", ""),
        "nodes": form.whole("nodes", 1),
        "devices_per_node": form.whole("devices_per_node", 1),
        "device": chosen,
        "memory_bytes": form.size(None),
        "reserve_fraction": form.number("reserve_fraction", chosen.reserve_fraction),
        "overlap": form.fraction("overlap", chosen.overlap),
        "visit_seconds": form.number("visit_seconds", 0.0),
        "exchange_seconds": form.number("exchange_seconds", 0.0),
        "tensor_seconds": form.number("tensor_seconds", 0.0),
        "copy_byte_seconds": form.number("copy_byte_seconds", 0.0),
        "node_link": _read_link(form, "node_link", "", chosen.node_link),
        "network": _read_link(form, "network", "", chosen.network),
        "measured": _read_measured(form.raw("collective", [])),
        "optimizers": _read_optimizers(form.raw("optimizer", [])),
        "stages": _read_stages(form.raw("stage", [])),
    }


def read_device(table: object) -> Device:
    """A device from its table: what it states, on top of `like` where that is given."""
    form = Form(table, "[device]", _DEVICE_KEYS)
    base = device(form.text("like")) if form.has("like") else None
    start: dict[str, Any] = {}
    if base is not None:
        start = {each.name: getattr(base, each.name) for each in dataclasses.fields(Device)}

    def default(key: str) -> tuple[Any, ...]:
        return (start[key],) if base is not None else ()

    own_name = f"{base.name} (changed)" if base is not None else None
    return Device(
        name=form.text("name", own_name) if own_name else form.text("name"),
        memory_bytes=form.size(*default("memory_bytes")),
        peak_flops=_read_rates(form, start.get("peak_flops", {})),
        memory_bytes_per_second=form.number("memory_bytes_per_second", *default("memory_bytes_per_second")),
        node_link=_read_link(form, "node_link", "device.", *default("node_link")),
        network=_read_link(form, "network", "device.", *default("network")),
        overlap=form.truth("overlap", *default("overlap")),
        matmul_efficiency=form.number("matmul_efficiency", *default("matmul_efficiency")),
        memory_efficiency=form.number("memory_efficiency", *default("memory_efficiency")),
        kernel_seconds=form.number("kernel_seconds", *default("kernel_seconds")),
        reserve_fraction=form.number("reserve_fraction", *default("reserve_fraction")),
        note=form.text("note", start.get("note", "")),
        source=_read_source(form, start.get("source", {})),
    )


def _read_rates(form: Form, base: Mapping[str, float]) -> dict[str, float]:
    rates = Form(form.raw("peak_flops", {}), "[device.peak_flops]", DTYPES)
    return dict(base) | {dtype: rates.number(dtype) for dtype in rates.table}


def _read_source(form: Form, base: Mapping[str, str]) -> dict[str, str]:
    given = form.raw("source", {})
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise UsageError(f"key 'source' in [device] is {given!r} but must be a table of texts; correct it")
    return dict(base) | dict(given)


def _read_link(form: Form, key: str, prefix: str, *default: Link) -> Link:
    if default and not form.has(key):
        return default[0]
    link = Form(form.raw(key), f"[{prefix}{key}]", _LINK_KEYS)
    return Link(link.number("bytes_per_second"), link.number("latency_seconds"), link.text("name", ""))


def _tables(entries: object, key: str, known: tuple[str, ...]) -> list[Form]:
    if not isinstance(entries, (list, tuple)):
        raise UsageError(f"key '{key}' is {entries!r} but must be a list of tables; write [[{key}]]")
    return [Form(entry, f"[[{key}]]", known) for entry in entries]


def _read_measured(entries: object) -> tuple[Measured, ...]:
    return tuple(
        Measured(
            each.text("kind"),
            each.text("group"),
            each.number("latency_seconds"),
            each.number("bytes_per_second"),
            each.number("busy_fraction", 0.0),
        )
        for each in _tables(entries, "collective", _COLLECTIVE_KEYS)
    )


def _read_optimizers(entries: object) -> tuple[TimedOptimizer, ...]:
    return tuple(
        TimedOptimizer(each.text("name"), each.number("tensor_seconds"), each.number("byte_seconds"))
        for each in _tables(entries, "optimizer", _OPTIMIZER_KEYS)
    )


def _read_stages(entries: object) -> tuple[TimedStage, ...]:
    return tuple(
        TimedStage(
            each.text("signature"),
            each.text("name"),
            tuple(int(size) for size in each.numbers("batches")),
            each.numbers("forward_seconds"),
            each.numbers("backward_seconds"),
        )
        for each in _tables(entries, "stage", _STAGE_KEYS)
    )


def write_toml(table: Mapping[str, Any], place: str = "") -> str:
    """TOML text of a table of texts, numbers, truths, their lists, tables and lists of tables: all a cluster needs.

    Plain values come first because in TOML what follows a heading belongs to it.
    """
    plain = {key: value for key, value in table.items() if not _is_tables(value)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in table.items():
        heading = f"{place}.{_key(key)}" if place else _key(key)
        if isinstance(value, Mapping):
            text += f"\n[{heading}]\n{write_toml(value, heading)}"
        elif _is_tables(value):
            text += "".join(f"\n[[{heading}]]\n{write_toml(each, heading)}" for each in value)
    return text


def _is_tables(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and all(isinstance(each, Mapping) for each in value))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string but for DEL and the surrogate pairs of ensure_ascii.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
