"""A transformer dropped into unlabelled matrices and vectors, put back together from the weights alone.

:mod:`~strati.reassembly.transformer.blueprint` says what the blocks of a network are made of,
:mod:`~strati.reassembly.transformer.drop` takes a network apart, :mod:`~strati.reassembly.transformer.solve`
puts one back:
matrices that share hidden units first (``units``), then all of them on one time line by how their shares of
the residual
stream are alike (``stream``, ``arrange``), then biases and norms (``vectors``). torch is needed only by
``verify``, which
runs a network on data.
"""
