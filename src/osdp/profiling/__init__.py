"""Times a cluster from within: what `osdp profile` measures, and how."""
