"""One step of a model without its memory: the tensors alive at each moment, and the allocator's reaction to them."""
