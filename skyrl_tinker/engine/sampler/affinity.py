"""Affinity of requests to replicas: those of a prefix go to one, unless it has too many in flight."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, SampleSource
from skyrl_tinker.inference.constants import BASE_MODEL

PREFIX_BYTES = 1024  # of 128 tokens
LEAST = 4
"""Sequences that a prefix may always have in flight."""


class Affinity:
    """Keys by which a replica is chosen, and the sequences in flight under each.

    A key is made of the weights and a prompt's beginning. A key with half of a replica's share of all
    sequences in flight takes no more: a prefix twice as long is then used, so that the turns of a
    conversation stay together, apart from conversations with the same beginning. The bound follows
    V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018; client and
    router hash keys without knowledge of the load, so the key changes instead of the replica.
    """

    def __init__(self, replicas: Callable[[], int]) -> None:
        self._replicas = replicas
        self._sequences: Counter[str] = Counter()  # in flight, by key
        self._total = 0  # of them

    @contextmanager
    def key(self, source: SampleSource, prompt: bytes, sequences: int) -> Iterator[str]:
        """Choose a key for a request; its sequences count under the key within the context."""
        most = max(LEAST, self._total / (2 * self._replicas()))
        key = next(key for key in _keys(source, prompt) if self._sequences[key] < most)
        self._sequences[key] += sequences
        self._total += sequences
        try:
            yield key
        finally:
            self._total -= sequences
            self._sequences[key] -= sequences
            if not self._sequences[key]:
                del self._sequences[key]


def _keys(source: SampleSource, prompt: bytes) -> Iterator[str]:
    """Yield keys of longer and longer prefixes, then an endless series of further keys."""
    digest = hashlib.sha256(_name(source).encode())
    begin, end = 0, PREFIX_BYTES
    while True:
        digest.update(prompt[begin:end] + b"|")  # another key at each step, also behind the prompt's end
        yield digest.hexdigest()[:32]
        begin, end = end, 2 * end


def _name(source: SampleSource) -> str:
    if isinstance(source, InflightTarget):
        return source.tag
    return source.name if isinstance(source, WeightVersion) else BASE_MODEL
