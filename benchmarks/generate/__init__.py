"""Benchmarks of the adapter generator."""
