"""Rows that the dashboard and traces show: requests, and the points of training curves.

In: a connection. Out: values for `api.waiting`, `api.resources` and the engine's export of traces. Points
are written by the engine in the commit of the step that they describe.
"""
