"""Sampling servers and their router as child processes: started, checked, replaced, ended.

In: a `SamplerSpec`. Out: URLs of servers, and reports of those that died or hang. Imports `inference.client`
and `processes`.
"""
