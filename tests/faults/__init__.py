"""Builders of bad input. Each makes its fault from raw bytes, so that no engine can mend it on the way."""
