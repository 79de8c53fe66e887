"""The sampling engines' own metrics, those of all replicas in one text."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp
from skyrl_tinker.inference.client.sampling_port import Dialect

WITHIN_S = 1.0
REPLICA = "replica"


Replicas = tuple[JsonHttp, Mapping[int, str], Dialect]
"""Replicas of one base model: their client, their URLs by number, and the dialect of their engine."""


async def replica_metrics(of_bases: Sequence[Replicas]) -> bytes:
    """Return the exposition format. A replica that does not answer within WITHIN_S is left out.

    Replicas of the first base model have their numbers as names, others as their logs: 1-0.
    """
    places = {
        (f"{base}-{number}" if base else str(number)): (http, url, dialect)
        for base, (http, urls, dialect) in enumerate(of_bases)
        for number, url in urls.items()
    }
    texts = await asyncio.gather(*(_read(http, url) for http, url, _ in places.values()))
    told = {name: (text, place[2]) for (name, place), text in zip(places.items(), texts, strict=True)}
    return await asyncio.to_thread(joined, told)


def joined(texts: Mapping[str, tuple[str, Dialect]]) -> bytes:
    """Join the texts of replicas, in their dialects, by name, which becomes a label of each sample."""
    families: dict[str, Metric] = {}
    for replica, (text, dialect) in texts.items():
        for family in _families(text, dialect):
            shared = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if shared.type != family.type:  # of another version of the engine
                continue
            for sample in family.samples:
                shared.add_sample(sample.name, {**sample.labels, REPLICA: replica}, sample.value)
    return generate_latest(_Families(families.values()))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(text: str, dialect: Dialect) -> list[Metric]:
    """Read the engine's families, without the times at which series began; none of a malformed text."""
    try:
        found = list(text_string_to_metric_families(text))
    except ValueError:
        return []
    return [
        family
        for family in found
        if family.name.startswith(dialect.metrics_prefix)
        and not family.name.endswith("_created")
        and family.name not in dialect.unbounded_metrics
    ]


async def _read(http: JsonHttp, url: str) -> str:
    """Return the text of a replica; empty if it does not answer."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return await http.text(f"{url}/metrics")
    except (SamplerError, HttpStatusError, TimeoutError):
        return ""
