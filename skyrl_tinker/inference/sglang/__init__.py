"""SGLang behind the ports of a sampling engine: its dialect, its control plane, its server's process.

In: calls of the ports in `inference.client` and `inference.servers`. Out: SGLang's requests, parsed answers,
its command line and environment. Imports those two; SGLang runs in a separate environment.
"""
