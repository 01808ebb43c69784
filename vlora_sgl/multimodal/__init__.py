"""Images on their way through the engine: requests, encoder cache, early encoding; encoders, graphs and layers."""
