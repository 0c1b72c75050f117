"""Grokking of modular addition (Nanda et al. 2023)."""
