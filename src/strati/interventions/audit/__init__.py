"""What the rows of a study say: correlations with intervals, robust and critical layers, verdicts."""
