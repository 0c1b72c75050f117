"""degeneracy-in-the-loss-landscape: learning coefficients, counts, interaction basis, modules."""
