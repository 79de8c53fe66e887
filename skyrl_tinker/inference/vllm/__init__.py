"""vLLM behind the ports of a sampling engine: its dialect, its control plane, its server's process.

In: calls of the ports in `inference.client` and `inference.servers`. Out: vLLM's requests, parsed answers,
its command line and environment. Imports those two; vllm itself only in the server's own entry and plugin.
"""
