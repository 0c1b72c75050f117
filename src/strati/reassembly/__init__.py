"""A residual network shuffled into unlabelled linear layers, put back in order.

Block ``k`` computes ``x + W_out act(W_in x + b_in) + b_out``; a last linear layer follows. Reading the
pieces, scoring which two belong together, ordering the blocks, and searching both at once live here.
torch is needed by :mod:`strati.reassembly.residual.make` alone, which trains and drops networks of its own.
"""
