"""Triton kernels, each beside its float64 reference. Nothing here imports another module of ours, or SGLang."""
