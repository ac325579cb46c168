"""User code around a model by a class swap: the mixin, the classes, what is refused, the proof that the code runs."""
