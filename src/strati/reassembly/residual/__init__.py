"""Reassembly of a residual network whose blocks are ``x + W_out act(W_in x + b_in) + b_out``."""
