"""Recover the order of the shuffled matrices and vectors of a transformer from the weights alone.

``blueprint`` lists the tensors of a block and ``shuffle`` makes a puzzle. ``solve`` pairs matrices that share hidden
units (``matrices``, ``evidence``), places all units on one time line by their similarity on the residual stream
(``similarity``, ``timeline``, ``arrange``), then biases and norms (``vectors``). ``verify`` runs the network on data
to check and repair the answer; only that needs torch.
"""
