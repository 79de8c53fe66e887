"""Sampling: the servers, our client to them, and each engine's own code, some of which runs inside it.

In: sample requests and weight updates. Out: generated tokens with logprobs. Imports `domain`, `errors` and
`processes`; an engine itself is imported by its plugin and its entry alone.
"""
