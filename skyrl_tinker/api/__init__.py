"""The HTTP API: it validates, commits to the store, waits and answers.

In: requests of the tinker SDK and of OpenAI clients. Out: responses of `protocol.schemas`. Light: no torch,
ray, transformers or vllm; it starts in about a second. Imports `store`, `protocol` and `domain`; reaches
the engine by rows of the store, and by a local socket for views and OpenAI streams.
"""
