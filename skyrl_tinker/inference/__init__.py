"""Sampling: the servers, our client to them, and the plugin that runs inside vLLM.

In: sample requests and weight updates. Out: generated tokens with logprobs. Imports `domain`, `errors` and
`processes`; vllm itself is imported by the plugin alone.
"""
