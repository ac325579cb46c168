"""A model's modules over devices: sizes, what may be split, and the exact partition of the chain under limits."""
