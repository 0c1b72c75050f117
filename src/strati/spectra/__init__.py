"""One matrix and what its eigenvalues say; every matrix of a network (scan); networks side by side (compare)."""
