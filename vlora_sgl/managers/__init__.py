"""What runs beside SGLang's managers: scheduling, adapters, the prefix cache, metrics."""
