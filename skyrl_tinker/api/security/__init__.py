"""API keys, session tokens and signed URLs.

In: headers, tokens, URLs. Out: the caller and its owner, or UnauthenticatedError and ForbiddenError.
Imports `store`; the lowest layer of the API.
"""
