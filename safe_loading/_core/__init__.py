"""What every folder shares; imports no torch."""
