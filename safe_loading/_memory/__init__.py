"""What fits where: plans, forecasts, audits, and the traced step under them."""
