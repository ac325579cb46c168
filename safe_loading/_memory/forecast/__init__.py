"""A forecast of memory: quantized models made from a config, the events of a run, and the report."""
