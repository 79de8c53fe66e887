"""Trainer and samplers on the same GPUs: whose turn it is, and the change between them."""
