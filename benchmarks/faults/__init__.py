"""Faults on purpose: real processes of `osdp train` that are killed, stopped, cut off, or given damaged files."""
