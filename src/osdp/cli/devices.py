"""`osdp devices`: the devices known by name."""

from __future__ import annotations

import argparse
import sys

from osdp.cli.output import print_json
from osdp.cli.parser import Commands
from osdp.cluster import devices

DESCRIPTION = """\
List the devices that a cluster can be made of, with the figures that a plan
reckons with.

A cluster is written as NODESxDEVICESxNAME, such as 2x8xA100-80GB, 8xRTX-TITAN
or A100-80GB, or as the path of a cluster file (.toml) with figures of your own.
FLOP/s are the datasheet's dense peaks. What is reached of them is calibrated on
published runs, or estimated from data sheets; --json has every figure, and its
source."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("devices", help="list the devices known by name", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with the sources")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json({"version": 1, "devices": [device.to_dict() for device in devices()]})
        return
    from osdp.report.catalogue import device_rows
    from osdp.report.printing import console
    from osdp.report.terminal import print_devices

    print_devices(device_rows(), console(sys.stdout))
