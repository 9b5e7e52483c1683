"""`osdp doctor`: what a user runs first on new machines, and the report to send."""
