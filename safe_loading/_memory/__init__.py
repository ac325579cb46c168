"""Fitting models into memory: plans, forecasts, audits, and the traced step under them."""
