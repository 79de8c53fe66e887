"""Sampling: the servers, our client to them, each engine's own code, and the plugin that runs inside one.

In: sample requests and weight updates. Out: generated tokens with logprobs. Imports `domain`, `errors` and
`processes`; an engine itself is imported by its plugin and its entry alone.
"""
