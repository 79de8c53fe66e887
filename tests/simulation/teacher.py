"""A client that samples a further base model, which is not served for a time, beside those that train."""

import asyncio
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.api.support.world import FACTS, sample
from tests.simulation.client import Client, error_of, now, sequences
from tests.simulation.server import Server

NAME, TOKEN, TOKENS = "teacher", 7, 4
"""Its only name, what it draws, and how often."""
FURTHER = replace(FACTS, directory="/models/teacher", names=(NAME,), vocab_size=TOKEN + 1, trainable=False)
SAMPLES, FEW, PAUSE_S, AWAY_S = (2, 8), (1, 3), 12.0, 30.0
"""Fewest and most samples, also of a short history, most time between two, and without it."""


def draw(adapter: Any, prompt: Sequence[int], most: int) -> Sequence[int]:
    assert adapter is None, "it is not trained"
    return [TOKEN] * most


class Teacher:
    def __init__(self, client: Client, server: Server, random: Random, *, short: bool) -> None:
        """`short`: with few samples, of a base model that is always served."""
        self._client = client
        self._server = server
        self._random = random
        self._short = short
        self._away = (float("inf"), float("inf"))  # from when to when it was not served

    async def live(self) -> None:
        """Sample, and see each answer right, or refused while it is away."""
        session = await self._client.session()
        beating = asyncio.create_task(self._client.beat(session))
        leaves = not self._short and self._random.random() < 0.5
        leaving = asyncio.create_task(self._leave()) if leaves else None
        sampler = await self._sampler(session)
        for number in range(self._random.randint(*(FEW if self._short else SAMPLES))):
            await self._sample(sampler, number)
            await asyncio.sleep(self._random.random() * (PAUSE_S / 3 if self._short else PAUSE_S))
        if leaving:
            await leaving
            await self._sample(sampler, SAMPLES[1])
            assert now() > self._away[1]
        beating.cancel()

    async def _leave(self) -> None:
        """Have the server end and start again without it, and then with it."""
        await asyncio.sleep(self._random.random() * AWAY_S)
        self._away = (now(), self._away[1])
        self._server.serve(self._server.bases[:1])
        await asyncio.sleep(self._random.random() * AWAY_S)
        self._server.serve((*self._server.bases[:1], FURTHER))
        self._away = (self._away[0], now())

    async def _sampler(self, session: str) -> str:
        for number in itertools.count():
            began = now()
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": NAME}
            answer = await self._client.post("create_sampling_session", body)
            if answer.status_code == 200:
                break
            self._require_away(began, answer.text)
            await asyncio.sleep(1.0)
        return str(answer.json()["sampling_session_id"])

    async def _sample(self, sampler: str, number: int) -> None:
        began = now()
        body = sample(sampler, number, sampling_params={"max_tokens": TOKENS})
        answer = await self._client.post("asample", body)
        if answer.status_code == 200:
            answer = await self._client.result(answer.json()["request_id"])
            if error_of(answer) is None:
                assert [list(each["tokens"]) for each in sequences(answer)] == [[TOKEN] * TOKENS]
                return
        if not self._server.faults.refuses(answer.text):
            self._require_away(began, answer.text)

    def _require_away(self, began: float, text: str) -> None:
        """Check that it was refused as the base model was away, and was when the request was under way."""
        assert re.search("base.model(?: is)? 'teacher', expected", text), text
        left, back = self._away
        assert began <= back, text
        assert now() >= left, text
