"""Published training runs, priced as the plans that were run."""
