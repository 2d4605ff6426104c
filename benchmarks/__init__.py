"""Measurements of curvcert: each file is one, runs by `python -m benchmarks.NAME` and leaves a record."""
