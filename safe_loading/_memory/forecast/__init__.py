"""A forecast of memory: quantised models made from a config, the events of a run, and the report."""
