"""Planners of others on osdp's problems: each one's input made from osdp's tables, its answer judged by osdp."""
