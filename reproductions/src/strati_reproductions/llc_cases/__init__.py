"""Functions whose learning coefficient is known exactly: what the sampler is measured against."""
