"""Quantised checkpoints: weights stored as codes and scales, found and decoded in numpy, without their libraries.

``recognise`` tells which tensors belong together and what a decoded weight is called; each scheme has a module of
its own (``gptq``, ``awq``, ``bitsandbytes``, ``float8``, ``compressed``, ``microscaling``); ``rounding`` says how large
the error is that rounding leaves. GGUF has its own codes: see ``formats/gguf``.
"""
