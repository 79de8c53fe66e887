"""JSON messages of the protocol, declared once: requests tolerant of old SDKs, responses exact.

In: JSON objects. Out: typed messages, or a UserError that names the field. Imports `errors` only.
"""
