"""A model before its weights."""
