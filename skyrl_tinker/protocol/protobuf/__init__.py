"""Protobuf and JSON forms of forward_backward bodies, and protobuf forms of results."""
