"""How much of what trains in a plain process can be planned, over the architectures of the installed transformers."""
