"""A model's modules over devices: sizes, units of placement, and the exact partition of the chain under limits."""
