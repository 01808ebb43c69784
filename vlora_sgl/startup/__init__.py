"""How processes start: where each comes from, what it does not import, what it does not print."""
