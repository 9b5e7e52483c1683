"""Every usual way to train beside osdp: on real ranks, over real links of a chosen rate, within a real memory limit.

python -m benchmarks.rivals --minutes 25     # the most telling cells first; resumes what was measured before
python -m benchmarks.rivals --page           # tables, plots and the documentation's page from the results
"""
