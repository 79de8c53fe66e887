"""Doors into vLLM's processes: its general-plugin entry point, and middlewares that commands name.

In: vLLM's start, if SKYRL_TINKER_VLLM is set, and requests to its server. Out: the patches of
`inference.vllm.patches` applied, answers as arrays, weights pulled from the engine's host.
"""
