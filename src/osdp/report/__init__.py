"""Shows an answer: first the values of a page are computed, then they are printed."""
