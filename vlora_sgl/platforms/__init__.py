"""Machines that SGLang does not claim by itself."""
