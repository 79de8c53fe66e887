"""Checks of everything that a request and the base model's facts alone can show to be wrong.

Messages name the field (and datum), what was found and what was expected.
"""
