"""HTTP API: it validates requests, commits them to the store, waits for results and answers.

In: requests of the tinker SDK and of OpenAI clients. Out: responses of `protocol.schemas`. It imports
`store`, `protocol` and `domain`, but nothing that trains or samples, and starts in about a second. It
reaches the engine by rows of the store, and by a local socket for queue views and OpenAI streams.
"""
