"""top-down-eigenspectra: random matrix theory on real networks."""
