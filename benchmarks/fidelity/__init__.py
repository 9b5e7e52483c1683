"""Predicted against measured: plans of many models run for real, and the error of every prediction.

python -m benchmarks.fidelity --save build/fidelity.jsonl --for-minutes 45
"""
