"""Quantised checkpoints: weights stored as codes and scales, found and decoded in numpy, without their libraries.

``recognise`` finds which tensors belong together and how a decoded weight is named; each scheme has a module
(``gptq_awq``, ``bnb``, ``compressed``, ``scaled``); ``rounding_error`` estimates the error that rounding leaves. GGUF
has codes of its own: see ``formats/gguf_file``.
"""
