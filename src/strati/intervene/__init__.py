"""Change a layer and watch: re-initialise, re-randomise, record performance and metrics, audit the metrics."""
