"""Where people already work: one file for each framework, imported when it is asked for."""
