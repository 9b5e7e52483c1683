"""Predicted against measured: plans of many models run for real, and the error of every prediction.

python -m benchmarks.fidelity --save docs/benchmarks/fidelity.json
"""
