"""A test accuracy that falls after millions of steps (Prakash and Martin 2025)."""
