"""Checks of everything that a request and the base model's facts alone can show to be wrong.

In: requests, decoded. Out: nothing, or a UserError that names the field (and datum), what was found and what
was expected. Imports `protocol.schemas`, `protocol.protobuf` and `domain`; knows no database.
"""
