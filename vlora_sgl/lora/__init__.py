"""Adapters inside the engine: reading them, keeping them, routing rows to them."""
