"""The Tinker wire protocol: request and response schemas, protobuf forms, validation, stored forms.

In: bytes and JSON of a client. Out: checked values of `skyrl_tinker.domain`, and the bytes of responses.
Pure: no database, no HTTP framework, no torch. Imports `domain` and `errors`.
"""
