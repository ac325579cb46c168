"""One step of a model without its memory: what is alive when, and what the allocator would make of it."""
