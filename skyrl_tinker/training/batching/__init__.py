"""Datums of many requests as packed rows under a token budget, and their outputs back by request."""
