"""Merging into weights in memory: the updates of each layer, the reasons against a merge, and the arithmetic."""
