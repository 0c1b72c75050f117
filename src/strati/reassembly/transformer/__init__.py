"""The shuffled matrices and vectors of a transformer, put back in order from the weights alone.

:mod:`~strati.reassembly.transformer.blueprint` lists the tensors of a block, ``shuffle`` takes a network apart, and
``solve`` puts one back: matrices that share hidden units first, then all units on one time line by how alike they are
on the residual stream (``similarity``, ``timeline``, ``arrange``), then biases and norms (``vectors``). Only
``verify``, which runs a network on data, needs torch.
"""
