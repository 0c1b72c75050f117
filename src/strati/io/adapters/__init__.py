"""Adapters (PEFT's LoRA and its kin): updates of a network stored as two thin matrices each.

``lora`` is one update and its algebra, ``recognise`` finds the pairs among a checkpoint's tensors, ``merge`` puts an
adapter onto the network it was made for.
"""
