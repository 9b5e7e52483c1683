"""`osdp completion`: a script with which a shell completes osdp's commands and options."""

from __future__ import annotations

import argparse

from osdp.cli.parser import Commands

DESCRIPTION = """\
Print a script with which a shell completes osdp's commands, options and files.
It is static: completing starts no Python."""

EXAMPLES = """\
to install:
  osdp completion bash > ~/.local/share/bash-completion/completions/osdp
  osdp completion zsh > "${fpath[1]}/_osdp"
  osdp completion tcsh > ~/.osdp-completion.tcsh    (source it in ~/.tcshrc)"""

SHELLS = ("bash", "zsh", "tcsh")
FILES, FOLDERS = ("FILE", "PLAN", "A", "B"), ("DIR",)


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion", help="print a script for your shell's completion", description=DESCRIPTION, epilog=EXAMPLES
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    import shtab

    from osdp.cli.main import build_parser

    parser = build_parser()
    for each in _all(parser):
        for action in each._actions:
            kind = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY if action.metavar in FOLDERS else None
            if kind is not None:
                setattr(action, "complete", kind)  # noqa: B010  where shtab looks
    print(shtab.complete(parser, shell=arguments.shell))


def _all(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found
