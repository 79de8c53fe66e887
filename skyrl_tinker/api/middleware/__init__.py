"""Layers around the routes: authentication, admission, body limits, compression, fast routes.

In: raw ASGI requests. Out: requests with an owner and a bounded, decompressed body, or an error response.
Imports `api.security` and `api.error_responses`; knows no route.
"""
