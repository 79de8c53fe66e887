"""skyrl-tinker: an open server that speaks the Tinker API."""

__version__ = "0.1.0"
