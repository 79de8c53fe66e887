"""Base models of one engine: each with its trainer and samplers, or samplers alone.

In: samples of all of them, and settings of each. Out: each sample at the samplers of its base model. Imports
`sampler`, `parity` and `colocation`.
"""
