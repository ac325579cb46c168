"""Quantized layers: how they are recognized, and which values their codes stand for."""
