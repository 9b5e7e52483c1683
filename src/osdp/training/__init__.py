"""What `osdp train` is made of: data, the ranks' world, the loop, and what it says. It uses the public API only."""
