"""Acting on what was measured: curves, budgets, the choice of settings, predictions, and writing networks."""
