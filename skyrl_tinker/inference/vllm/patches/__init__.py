"""Patches of vLLM, checked against the source of known releases. Runs inside vLLM's processes only.

In: `patch_set.apply`, by the plugin. Out: patched classes of vLLM. Imports vllm, and `inference.client` for
the format in which scores are requested.
"""
