"""Learning coefficients and effective parameters: samplers, what their draws say, and exact values to test them on."""
