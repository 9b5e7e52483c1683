"""The command `osdp`: one small file a command. Nothing here imports torch before a command runs."""
