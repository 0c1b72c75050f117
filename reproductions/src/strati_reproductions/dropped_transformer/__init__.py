"""Transformers dropped into pieces and put back from their weights: the networks, the table, the figures."""
