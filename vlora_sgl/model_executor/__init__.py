"""Carries a plan out: the mode switch, and the model runner and decode graphs that know two variants."""
