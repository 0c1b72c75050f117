"""Bayesian influence, loss kernel and susceptibilities: covariances of losses over the local posterior."""
