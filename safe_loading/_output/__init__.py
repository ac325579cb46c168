"""A folder that appears whole or not at all."""
