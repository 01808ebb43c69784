"""Benchmarks: each script measures one claim and records its figures in ``results/summary.json``."""
