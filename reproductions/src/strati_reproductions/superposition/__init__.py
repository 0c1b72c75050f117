"""The toy model of superposition (Chen et al. 2023)."""
