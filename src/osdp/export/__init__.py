"""A plan for people who do not run osdp: as code or configuration of what they run, with what gets lost on the way."""

from osdp.export.degrade import Degraded, degraded
from osdp.export.write import TARGETS, Export, export, traced_for

__all__ = ["TARGETS", "Degraded", "Export", "degraded", "export", "traced_for"]
