"""The modules that every folder shares; imports no torch."""
