"""How each LoRA layer kind turns into a block update of its weight: arithmetic, layers, and what forbids a merge."""
