"""JSON messages of the protocol, declared once: requests tolerant of old SDKs, responses exact."""
