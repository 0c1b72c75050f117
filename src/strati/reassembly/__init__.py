"""Recover the order of a network's shuffled, unlabelled layers; make such puzzles; recognise single layers.

:mod:`~strati.reassembly.residual` takes residual networks with recorded data: block ``k`` computes
``x + W_out act(W_in x + b_in) + b_out``, and a last linear layer follows. :mod:`~strati.reassembly.transformer` takes
transformers from their weights alone. torch is needed only to train a puzzle of your own
(:mod:`strati.reassembly.residual.make`) and to run a transformer on data.
"""
