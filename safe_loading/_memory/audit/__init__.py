"""Faults of a model that is about to be trained: a module for each group of checks."""
