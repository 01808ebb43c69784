"""Images on their way through the engine: requests, encoder cache, early encoding, the encoder's graphs and layers."""
