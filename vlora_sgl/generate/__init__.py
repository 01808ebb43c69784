"""The offline side: from data sets and small models to adapters (no server needed)."""
