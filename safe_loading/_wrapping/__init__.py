"""User code around a model by a class swap: the mixin, its checks, heads, and the proof that the code runs."""
