"""Ranks: the local rank that the launcher gave, and the same answer or the same error on every rank."""
