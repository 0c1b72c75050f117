"""The one place that states strati's version."""

__version__ = "0.1.0"
