"""Checks of everything that a request and the base model's facts alone can show to be wrong.

In: requests, decoded. Out: nothing, or a UserError that names the field (and datum), the value found and
the value expected. Imports `protocol.schemas`, `protocol.protobuf` and `domain`; knows no database.
"""
