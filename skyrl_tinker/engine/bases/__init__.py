"""Base models of one engine: each with its trainer and samplers, or one of the two.

In: requests of all of them, and the runtime of each. Out: each request at its base model, each runtime
started and run by itself, and their states. Imports `trainer`, `sampler` and `colocation`.
"""
