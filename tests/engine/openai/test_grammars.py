"""A schema that a sampler cannot follow is the client's error; the sampler goes on with all others."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_tinker.engine.openai.openai_call import OpenAICall
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.sampler.fleet import ATTEMPTS
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotFoundError, SamplerError, SkyrlTinkerError
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import FieldError, parse_openai
from tests.engine.support.world import FACTS

FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"allOf": [{"$ref": "#"}]}}}
STRICT = {"type": "function", "function": {"name": "a", "parameters": {}, "strict": True}}
GIVEN_UP = (500, "Internal server error")
CHUNK = {"choices": [{"index": 0, "delta": {"content": "{"}}]}


class Refusing:
    """Data plane of a sampler that answers with an error."""

    dialect = VLLM

    def __init__(self, error: tuple[int, str], chunks: int = 0) -> None:
        self._status, self._message = error
        self._chunks = chunks

    async def openai(self, *_: object, **__: object) -> Any:
        raise VLLM.refusal(self._status, self._message)

    @asynccontextmanager
    async def stream(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            error = {"error": {"code": self._status, "message": self._message}}
            for event in (*self._chunks * (CHUNK,), error):
                yield b"data: " + json.dumps(event).encode() + b"\n\n"

        yield pieces()


async def answered(relay: OpenAIRelay, call: OpenAICall) -> None:
    if not call.request.stream:
        await relay._send(call, 0)
        return
    async with AsyncExitStack() as upstream:
        async for _ in await relay._open(call, 0, upstream):
            """Read it to its end."""


async def failure(error: tuple[int, str], chunks: int = 0, **fields: Any) -> SkyrlTinkerError:
    """Return the error of a chat whose sampler answers with `error`, in a stream behind some chunks."""
    none: Any = None
    leases = SimpleNamespace(open=lambda _: nullcontext("name"), cache_fields=dict)
    affinity = SimpleNamespace(key=lambda *_: nullcontext("key"))
    samplers: Any = SimpleNamespace(leases=leases, affinity=affinity)
    fleet: Any = SimpleNamespace(client=SimpleNamespace(data=Refusing(error, chunks)))
    relay = OpenAIRelay(none, samplers, fleet, FACTS.name, none, Metrics())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
    request = parse_openai(ChatCompletionRequest, body)
    call = OpenAICall(request, None, None, [1], {"max_tokens": 1}, lambda answer: answer)
    with pytest.raises(SkyrlTinkerError) as raised:
        await answered(relay, call)
    return raised.value


@pytest.mark.parametrize(("stream", "chunks"), [(False, 0), (True, 0), (True, 2)])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": FORMAT}, "response_format"),
        ({"tools": [STRICT]}, "tools"),
        (
            {"tools": [STRICT | {"function": {"name": "a"}}], "parallel_tool_calls": False},
            "parallel_tool_calls",
        ),
    ],
)
async def test_it_is_named_and_not_tried_again(
    fields: dict[str, Any], named: str, stream: bool, chunks: int
) -> None:
    for error in (GIVEN_UP, (400, "Grammar error: Invalid type")):
        found = await failure(error, chunks, stream=stream, **fields)
        assert isinstance(found, FieldError), found
        assert found.field == named
        assert str(found).startswith(f"{named}: the sampler makes no answer that fits it: ")


async def test_other_failures_are_what_they_were() -> None:
    assert isinstance(await failure((404, "no such adapter"), response_format=FORMAT), NotFoundError)
    assert not isinstance(await failure((404, "no such adapter"), response_format=FORMAT), FieldError)
    assert isinstance(await failure((503, "gone"), response_format=FORMAT), SamplerError)
    assert isinstance(await failure(GIVEN_UP), SamplerError)


async def test_no_third_sampler_is_lost_with_a_grammar() -> None:
    """One that stands still while it compiles is replaced, as one that hangs."""
    none: Any = None
    tried: list[int] = []

    async def with_retry(_: object, attempts: int) -> None:
        tried.append(attempts)

    fleet: Any = SimpleNamespace(with_retry=with_retry)
    relay = OpenAIRelay(none, none, fleet, FACTS.name, none, Metrics())
    for fields in ({"response_format": FORMAT}, {}):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
        request = parse_openai(ChatCompletionRequest, asked)
        await relay.with_retry(OpenAICall(request, None, None, [1], {}, none), none)
    assert tried == [2, ATTEMPTS]
