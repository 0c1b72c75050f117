"""Exact closed forms for sequential multilayer perceptrons: counts, Jacobians, interaction moments and edges."""
