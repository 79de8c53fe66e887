"""Code that runs inside vLLM's processes: patches, checked against the source of known releases.

In: vLLM's general-plugin entry point, if SKYRL_TINKER_VLLM is set. Out: patched classes of vLLM. Imports
vllm, and `inference.client` for the format in which scores are requested.
"""
