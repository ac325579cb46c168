"""What can be wrong with a model that is about to be trained: a module a group of checks."""
