"""Merging from disk to disk: which disk tensor is part of which parameter, the changes, and the stream of bytes."""
