"""Are this machine and its installed packages fit for the work? Asked before a long run, answered in a second."""
