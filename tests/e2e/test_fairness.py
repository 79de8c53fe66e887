"""A small tenant beside a flood: told by what still waits when it is answered, not by time."""

import time

import pytest
import tinker

from tests.e2e.support.client import Client, datum, random_tokens
from tests.e2e.test_metrics import scraped

pytestmark = pytest.mark.long

UNIT = [datum(random_tokens(500, seed=seed)) for seed in range(32)]
"""About as many tokens as one unit of work takes."""
UNITS, MODELS = 24, 3


def waiting(client: Client) -> int:
    return int(scraped(client.url)["requests_pending/forward"])


def accepted(client: Client) -> int:
    numbers = scraped(client.url)
    return int(numbers["requests_pending/forward"] + numbers.get("requests_total/forward/ok", 0))


def test_one_request_is_answered_long_before_the_flood_that_came_first(client: Client) -> None:
    """In order of arrival it would be the last. The flood is of one tenant with several models."""
    small = client.new_lora()
    before = accepted(client)
    with tinker.ServiceClient(base_url=client.url) as service:
        models = [Client(client.url, service).new_lora(seed=seed) for seed in range(MODELS)]
        flood = [models[number % MODELS].forward(UNIT, "cross_entropy") for number in range(UNITS)]
        deadline = time.monotonic() + 60
        while accepted(client) < before + UNITS:
            assert time.monotonic() < deadline, "the flood was not accepted"
        deep = waiting(client)
        assert deep > UNITS / 3, "the flood is no flood"
        small.forward_backward([datum(random_tokens(10, seed=1))], "cross_entropy").result()
        assert waiting(client) > deep / 4
        assert all(each.result().metrics["loss:sum"] > 0 for each in flood)
