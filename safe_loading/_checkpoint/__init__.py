"""Reads checkpoints on disk: opening files, strict JSON, headers, indexes, hub ids. Nothing here imports torch."""
