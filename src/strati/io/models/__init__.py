"""Networks as small modules of our own, rebuilt from the names and shapes of their tensors; torch only."""
