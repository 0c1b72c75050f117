"""Interaction basis, interaction graph, modules, ablations, and the sparsifying reparametrisation."""
