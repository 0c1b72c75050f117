"""The one place that states strati's version."""

__version__ = "0.2.0"
