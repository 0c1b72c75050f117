"""The command line: one thin module per verb; numbers are computed elsewhere."""
