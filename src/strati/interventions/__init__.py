"""Interventions on layers: settings for :func:`strati.study` and :func:`strati.plan`, and context managers.

A setting (``truncate(rank=[4, 8])``) describes a family of changes that a study tries one layer at a time. A context
manager (``with truncated(model, {"fc1": 4}) as smaller:``) changes a module in memory and restores it on exit.
Studies (``study``), audits (``audit/``) and compression plans (``compress/``) are built on them.

Examples:
    >>> from strati import interventions as iv
    >>> iv.truncate(rank=[1, 4]).name
    'truncate'
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
