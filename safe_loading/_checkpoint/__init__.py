"""Reads what is on disk: opening files, strict JSON, headers, indexes, hub ids. Nothing here imports torch."""
