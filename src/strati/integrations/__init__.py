"""Callbacks that put a :class:`strati.Tracker` into other libraries' training loops."""
