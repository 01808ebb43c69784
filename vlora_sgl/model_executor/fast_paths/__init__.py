"""Attention and norms between the linears, faster than SGLang's Triton path; nothing here knows adapters."""
