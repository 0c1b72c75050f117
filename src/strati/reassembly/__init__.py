"""A residual network dropped into unlabelled linear layers, put back together.

Block ``k`` computes ``x + W_out act(W_in x + b_in) + b_out``; a last linear layer follows. Reading the
pieces, scoring which two belong together, ordering the blocks, and searching both at once live here.
torch is needed by :mod:`strati.reassembly.make` alone, which trains and drops networks of its own.
"""
