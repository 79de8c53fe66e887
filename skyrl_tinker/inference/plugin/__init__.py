"""Code that runs inside vLLM's processes: patches of the releases whose source they are checked against.

In: vLLM's general-plugin entry point, where SKYRL_TINKER_VLLM is set. Out: patched classes of vLLM. Imports
vllm, and `inference.client` for the form in which scores are asked for.
"""
