"""Merging into weights in memory: what each layer's adapters add, what forbids it, and the arithmetic."""
