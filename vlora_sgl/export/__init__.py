"""Merging a hot adapter into a base model ahead of serving, with delta adapters for everyone else.

The plug-and-play scheme of "Multi-LoRA Support Layer for vLLM", section 2.1: ``W_fused = W + s_h B_h A_h``; every
other adapter c becomes ``[s_c B_c, -s_h B_h] [A_c; A_h]`` on the merged base, of rank ``r_c + r_h`` (equations 1-5).
"""
