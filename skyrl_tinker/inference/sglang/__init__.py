"""SGLang behind the ports of a sampling engine: its dialect, its control plane, its server's process.

In: what `inference.client` and `inference.servers` ask of an engine. Out: SGLang's requests, answers read,
its command line and environment. Imports those two; SGLang runs in an environment of its own.
"""
