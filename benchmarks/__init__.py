"""Measurements, each run by one command from the root of a checkout: `python -m benchmarks --help` lists them."""
