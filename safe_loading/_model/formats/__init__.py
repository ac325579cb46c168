"""Quantization formats, each in a file of its own: all that the package knows of it, behind one protocol."""
