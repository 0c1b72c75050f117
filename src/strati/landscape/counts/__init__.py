"""How many directions of the weights are free on given data, and why: counts by structure, and exact ranks."""
