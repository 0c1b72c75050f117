"""Changing a layer and measuring what that does: interventions, forward passes that share work, metrics, units."""
