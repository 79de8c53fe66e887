"""A client beside the others that goes silent: its session times out, its older unnamed weights before."""

import asyncio
import itertools
from random import Random
from typing import Any

from sqlalchemy import Connection, text

from skyrl_tinker.config import EphemeralWeights, Timeouts
from skyrl_tinker.directories import Directories
from tests.api.support.world import Json, sample, step
from tests.simulation.backends import ENDLESS, drawn
from tests.simulation.client import Client, error_of, loss_of, model_body, now, sequences
from tests.simulation.faults import is_unread

TIMEOUT_S, KEEP, IDLE_S = 60.0, 1, 45.0
"""Settings of its server: timeouts.session_s, ephemeral.keep, ephemeral.idle_s."""
SILENT_S = 0.6 * TIMEOUT_S
SETTINGS = {
    "timeouts": Timeouts(session_s=TIMEOUT_S),
    "ephemeral": EphemeralWeights(keep=KEEP, idle_s=IDLE_S),
}


class Silent:
    """`path`: of its save, after `steps`."""

    def __init__(self, client: Client, random: Random) -> None:
        self._client = client
        self._random = random
        self._numbers, self._samples = itertools.count(1), itertools.count()
        self._session = ""
        self._model = ""
        self._drawn: dict[str, float] = {}  # since when weights are idle, by their sampling session
        self.path = ""
        self.steps: list[list[int]] = []

    async def live(self) -> None:
        """Train, and see the weights before the last ones expire; then be silent, and see all end."""
        self._session = await self._client.session()
        beating = asyncio.create_task(self._client.beat(self._session))
        created = await self._client.ok("create_model", model_body(self._session))
        self._model = created["model_id"]
        await self._client.result(created["request_id"])
        older = await self._publish()
        newest = await self._publish()
        await self._expire(older)
        await self._save()
        beating.cancel()
        for _ in range(self._random.randint(0, 2)):  # requests keep it alive, too
            await asyncio.sleep(SILENT_S)
            await self._pass(forward_only=True)
            await asyncio.sleep(SILENT_S)
            await self._sample(newest)
        await self._end(newest)

    async def _pass(self, *, forward_only: bool = False) -> int:
        """Run a pass; returns its number."""
        seq_id = next(self._numbers)
        future = await self._client.submit_pass(self._model, seq_id, 1, forward_only=forward_only)
        assert loss_of(await self._client.result(future)) == len(self.steps)
        return seq_id

    async def _publish(self) -> str:
        """Train, publish, and sample what was published; returns its sampling session."""
        passed = await self._pass()
        await self._run("optim_step", step(self._model, next(self._numbers)))
        self.steps.append([passed])
        number = next(self._numbers)
        body = {"model_id": self._model, "seq_id": number, "sampling_session_seq_id": number}
        published = await self._run("save_weights_for_sampler", body | {"kind": "snapshot"})
        sampler = str(published.json()["sampling_session_id"])
        await self._sample(sampler)
        return sampler

    async def _sample(self, sampler: str) -> None:
        """Draw from the newest weights."""
        answer = await self._draw(sampler)
        tokens = [list(each["tokens"]) for each in sequences(answer)] if not error_of(answer) else None
        assert tokens == [drawn(self.steps)], (tokens, answer.text)

    async def _expire(self, older: str) -> None:
        """Sample the weights before the last ones until they have expired: not before they are idle."""
        while True:
            error = error_of(await self._draw(older))
            if "have expired" in str(error):
                assert now() - self._drawn[older] >= IDLE_S
                return
            assert error is None or "are gone" in error, error  # a reboot, after the snapshot of newer ones
            await asyncio.sleep(self._random.choice((0.5, 0.5, 1.5)) * IDLE_S)

    async def _save(self) -> None:
        """Save until all could be read."""
        while not self.path:
            number = next(self._numbers)
            body = {"model_id": self._model, "seq_id": number, "path": f"s{number}"}
            answer = await self._client.result(await self._client.submit("save_weights", body))
            assert error_of(answer) is None or is_unread(error_of(answer)), answer.text
            self.path = answer.json().get("path", "")
            await asyncio.sleep(1.0)

    async def _end(self, sampler: str) -> None:
        """Send nothing from now on, with a sample under way; then see that there is no way back."""
        began = now()
        endless = await self._client.submit("asample", self._body(sampler, max_tokens=ENDLESS))
        error = error_of(await self._client.result(endless))
        assert "is finished (expired)" in str(error), error
        assert now() - began >= TIMEOUT_S
        number = next(self._numbers)
        late: tuple[tuple[str, Json], ...] = (
            ("session_heartbeat", {"session_id": self._session}),
            ("optim_step", step(self._model, number)),
            ("asample", self._body(sampler)),
        )
        for path, body in late:
            answer = await self._client.post(path, body)
            assert (answer.status_code, "is finished (expired)" in answer.text) == (410, True), answer.text

    def check(self, conn: Connection, directories: Directories) -> int:
        """Check that nothing is left of what only it used; returns the key of its model."""
        find = text("SELECT key, state FROM models WHERE model_id = :of")
        ((key, state),) = conn.execute(find, {"of": self._model})
        assert state == "released", state
        versions = text("SELECT id FROM adapter_versions WHERE model_key = :of AND dropped_at IS NULL")
        assert not conn.execute(versions, {"of": key}).all()
        assert not (directories.snapshot_dir / str(key)).exists()
        named = text("SELECT id FROM adapter_versions WHERE model_key = :of")
        for (version,) in conn.execute(named, {"of": key}):
            for root in (directories.ephemeral_dir, directories.overflow_dir):
                assert not (root / f"v{version}").exists(), version
        return int(key)

    # Requests

    async def _run(self, path: str, body: Json) -> Any:
        answer = await self._client.result(await self._client.submit(path, body))
        assert error_of(answer) is None, (path, answer.text)
        return answer

    async def _draw(self, sampler: str) -> Any:
        began = now()
        answer = await self._client.result(await self._client.submit("asample", self._body(sampler)))
        if error_of(answer) is None:
            self._drawn[sampler] = began
        return answer

    def _body(self, sampler: str, max_tokens: int = 4) -> Json:
        return sample(sampler, next(self._samples), sampling_params={"max_tokens": max_tokens})
