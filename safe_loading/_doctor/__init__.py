"""Is this machine, and what is installed on it, fit for the work? Asked before a long run, answered in a second."""
