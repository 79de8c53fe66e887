"""A client as the SDK is one: its requests as they are on the wire, sent until they are answered."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from skyrl_tinker.protocol.protobuf import sample_results
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from tests.api.support import passes
from tests.api.support.world import BASE, Json
from tests.simulation.asgi_call import Answer, HttpRequest
from tests.simulation.faults import IN_DOUBT, Faults, travel
from tests.simulation.server import Server

JSON, PROTOBUF = "application/json", "application/x-protobuf"
AGAIN_S = 1.0
"""Most time until a request without an answer is sent again."""
BEAT_S = 10.0


class Client:
    """Connection to the server on which requests and answers are lost and come twice."""

    def __init__(self, server: Server, faults: Faults) -> None:
        self._server = server
        self._faults = faults

    async def ok(self, path: str, body: Json) -> Json:
        """Return the JSON answer of a request, which succeeds in the end."""
        return _value(await self.post(path, body))

    async def session(self) -> str:
        """Create a session."""
        return str((await self.ok("create_session", {"sdk_version": "0.38.0"}))["session_id"])

    async def beat(self, session: str) -> None:
        """Send heartbeats."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.ok("session_heartbeat", {"session_id": session})

    async def post(self, path: str, body: Json) -> Answer:
        return await self._post(path, json.dumps(body).encode(), JSON)

    async def delete(self, path: str) -> bool | None:
        """Delete something; returns whether it was there, None if nobody knows, as an answer was lost."""
        answer = await self._send("DELETE", path, b"", JSON)
        assert answer.status_code in (200, 404), answer.text
        return True if answer.status_code == 200 else None if answer.again else False

    async def submit_pass(self, model: str, seq_id: int, token: int, *, forward_only: bool) -> str:
        """Return the id of the future."""
        message = _pass()
        message.model_id, message.seq_id, message.forward_only = model, seq_id, forward_only
        message.data[0].model_input[0].encoded_text.tokens = _tokens(token)
        answer = await self._post("forward_backward", message.SerializeToString(), PROTOBUF)
        return str(_value(answer)["request_id"])

    async def submit(self, path: str, body: Json) -> str:
        return str((await self.ok(path, body))["request_id"])

    async def result(self, request_id: str) -> Answer:
        """Poll until the future has ended, now and then once more."""
        body = json.dumps({"request_id": request_id}).encode()
        answer = await self._post("retrieve_future", body, JSON)
        if len(self._server.apis) > 1 and self._faults.random.random() < 0.2:
            answer, other = await asyncio.gather(
                *(self._post("retrieve_future", body, JSON) for _ in range(2))
            )
            assert other.content == answer.content, "all who wait get the result"
        elif self._faults.random.random() < 0.1:
            again = await self._post("retrieve_future", body, JSON)
            assert again.content == answer.content, "a future has one result"
        assert answer.status_code == 200, answer.text
        return answer

    async def _post(self, path: str, content: bytes, kind: str) -> Answer:
        return await self._send("POST", path, content, kind)

    async def _send(self, method: str, path: str, content: bytes, kind: str) -> Answer:
        request = HttpRequest(method, path, content, _headers(kind, len(content)))
        for again in itertools.count():
            try:
                answer = await self._exchange(request)
            except ConnectionError:
                await travel(AGAIN_S)
                continue
            if answer.status_code not in (408, 429) and answer.status_code < 500:
                answer.again = again if answer.again is None else answer.again
                return answer
            failing = self._faults.hit["the disk is full"] or self._faults.hit[IN_DOUBT]
            assert answer.status_code == 408 or failing, answer.text
            if answer.status_code != 408:
                await travel(AGAIN_S)
        raise AssertionError("it is sent until it is answered")

    async def _exchange(self, request: HttpRequest) -> Answer:
        await travel(0.01)
        if self._faults.due("a request is lost"):
            raise ConnectionResetError
        if request.path != "retrieve_future" and self._faults.due("a request comes twice"):
            both = (self._server.answer(request) for _ in range(2))
            one, other = await asyncio.gather(*both, return_exceptions=True)
            if isinstance(one, BaseException) or isinstance(other, BaseException):
                raise ConnectionResetError
            if one.status_code == other.status_code == 200 and request.path != "create_session":
                assert one.json() == other.json(), "a request that comes again gets the first one's answer"
            answer = other
            answer.again = 1
        else:
            answer = await self._server.answer(request)
        if self._faults.due("an answer is lost"):
            raise ConnectionResetError
        return answer


def loss_of(answer: Answer) -> float | None:
    """Return the loss of a pass, None if it failed."""
    if answer.content_type != PROTOBUF:
        return None
    return pb.ForwardBackwardOutput.FromString(answer.content).metrics["loss:sum"]


def sequences(answer: Answer) -> Sequence[Any]:
    """Return what was sampled."""
    found: Sequence[Any] = sample_results.sample_response_json(answer.content)["sequences"]
    return found


def error_of(answer: Answer) -> str | None:
    if answer.content_type == PROTOBUF:
        return None
    error: str | None = answer.json().get("error")
    return error


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


def model_body(session: str, rank: int = 8, base_model: str = BASE) -> Json:
    return {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": rank}}


def _value(answer: Answer) -> Json:
    assert answer.status_code == 200, answer.text
    value: Json = answer.json()
    return value


@cache
def _headers(kind: str, size: int) -> tuple[tuple[bytes, bytes], ...]:
    named = {"content-type": kind, "accept": PROTOBUF, "content-length": str(size)}
    return tuple((name.encode(), value.encode()) for name, value in named.items())


@cache
def _pass() -> ForwardBackwardRequest:
    message: Any = ForwardBackwardRequest.FromString(passes.protobuf("", 0, passes.datum([1, 2])))
    return message


def _tokens(first: int) -> bytes:
    return first.to_bytes(4, "little") + (2).to_bytes(4, "little")
