"""Code that runs inside vLLM's processes: patches of the exact version that they are asserted against.

In: vLLM's general-plugin entry point, in servers that we start. Out: patched classes of vLLM. Imports vllm,
and `inference.client` for the form in which scores are asked for.
"""
