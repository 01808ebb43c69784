"""What tests and benchmarks share: models, adapters, references, engines."""
