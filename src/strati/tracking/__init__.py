"""A training run over time: its checkpoints in order, what is measured of each, and where the run changes."""
