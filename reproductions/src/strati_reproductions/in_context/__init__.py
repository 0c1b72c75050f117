"""Stages of in-context learning (Hoogland et al. 2024; Wang et al. 2024)."""
