"""Packed rows: datums of many requests under a token budget, and their outputs sorted back by request."""
