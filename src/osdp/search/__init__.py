"""Which choice is best: an exact search over tables of costs. No torch, and nothing of how the costs arise."""
