"""How much of a network is free: learning coefficient, counts, interaction basis, graph, modules, sparsification."""
