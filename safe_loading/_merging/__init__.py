"""LoRA merged into weights, in memory and on disk."""
