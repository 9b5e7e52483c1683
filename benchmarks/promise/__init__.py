"""Plans random small models under random limits, runs the plans on real gloo ranks, and compares the peaks."""
