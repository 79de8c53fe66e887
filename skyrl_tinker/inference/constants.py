"""Names and numbers that client, servers and plugin share."""

BASE_MODEL = "base"
"""The name under which every sampler serves the base model."""

START_VERSION = "default"
"""The samplers' name for the weights with which they start: those of the base model."""

MAX_SEQUENCES = 256
"""Most sequences of one sample that are decoded at the same time, and most of one call."""

LONE_SEQUENCES = {"cuda": MAX_SEQUENCES, "cpu": 384}
"""Most sequences that a sampler gets of a lone session, by device: on a CPU more than MAX_SEQUENCES, since it
should not wait while those of a batch, which began and end together, are replaced one by one."""

RESERVED_SEQUENCES = 64
"""Further sequences that a sampler decodes, reserved for sessions that have none in flight."""

TOKEN = "SKYRL_TINKER_SAMPLER_TOKEN"
"""Environment variable with the token that our servers and their router require (TokenGuard)."""

REPLICA = "X-Skyrl-Tinker-Replica"
"""Header with the address of the server that answered (TokenGuard): a router chose it."""

SESSION = "X-Session-ID"
"""Header with a session's key: requests of one key go to one server, and to one of its engine cores."""

KEY_CHECK = "SKYRL_TINKER_KEY_CHECK"
"""Environment variable with the URL at which the router checks its clients' tokens."""

PROBE = "/skyrl-tinker/version-pull"
"""Path of a server that gets weights from another host; it answers 204 there (VersionPull)."""

SLICE_S = {"cpu": 0.02, "cuda": 0.0}
"""Seconds that samplers compute at a time, by device; 0: as long as others. With few cores, trainer, engine
and API, which compute in shorter slices, then run as soon as they wake up: no sample that arrives or ends
waits, so that batches stay full. The samplers' share is that of the others: nicer ones get nearly nothing of
cores that others keep busy."""

NICENESS = 10
"""Niceness of samplers where the kernel does not let them choose their slices."""

START_NICENESS = {"cpu": 10, "cuda": 0}
"""Niceness of imports and loads of a process that starts beside those that train or sample, by device. It may
take seconds longer, but its own tenants wait for seconds in any case."""

STARTING_NICER = "SKYRL_TINKER_STARTING_NICER"
"""Environment variable with the niceness of a server's imports."""
