"""OpenAI-compatible completions and chat on the samplers.

In: bodies that the API forwards over a local socket. Out: the samplers' responses under our model names,
streamed or whole. Imports `engine.sampler`.
"""
