"""A seeded fuzzer over what comes from outside: plan, cluster, configuration and data files, arguments, environment.

A case changes a good input at random. Some changes make nonsense by construction, and the case says so: it must be
refused with exit code 2. Whatever is changed, a command ends within a stated bound, without a traceback, with an exit
code of [Note: Exit codes] in osdp.cli.failed, and an error is one sentence.
"""

from benchmarks.fuzz.run import BOUND_SECONDS, KINDS, Report, fuzz

__all__ = ["BOUND_SECONDS", "KINDS", "Report", "fuzz"]
