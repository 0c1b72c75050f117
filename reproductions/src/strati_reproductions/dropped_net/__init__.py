"""dropped-neural-net: the public puzzle, and what the paper leaves open."""
