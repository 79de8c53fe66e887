"""One OpenAI-compatible request in the samplers' format, and its answers in the client's."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.samples import LISTED_PER_PLACE
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.openai.openai_requests import OpenAIRequest, listed, repeated
from skyrl_tinker.errors import NotFoundError, RequestGivenUpError, UserError
from skyrl_tinker.inference.client.sampling_port import AnswerReader
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import FieldError

_GIVEN_UP = (
    "it gave up, as where a schema refers to itself without an end, where a pattern is none, or where "
    "weights have diverged"
)
Chunk = dict[str, Any]
Path = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """Request in the sampler's format, without the fields of its dialect. `prompts`: token count of each."""

    request: OpenAIRequest
    owner: OwnerId | None
    version: WeightVersion | None
    prompts: list[int]
    body: dict[str, Any]
    read: AnswerReader

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.request.sequences

    @property
    def places(self) -> int:
        """Places that it takes among sequences in flight (SampleRequest.places); this text takes fourfold."""
        return max(self.sequences, 4 * listed(self.request, sum(self.prompts)) // LISTED_PER_PLACE)

    @property
    def tokens(self) -> int:
        """Tokens of the prompts, and the most that it generates in its places (SampleRequest.tokens)."""
        return sum(self.prompts) + self.places * int(self.body["max_tokens"])

    @property
    def path(self) -> Path:
        chat = isinstance(self.request, ChatCompletionRequest)
        return "/v1/chat/completions" if chat else "/v1/completions"

    @property
    def grammar(self) -> bytes:
        """Digest of what samplers make a grammar of: no names of schemas, no descriptions of tools."""
        form, calls = self.body.get("response_format") or {}, self.body.get("parallel_tool_calls")
        functions = [tool["function"] for tool in self.body.get("tools") or ()]
        tools = [[each.get(key) for key in ("name", "strict", "parameters")] for each in functions]
        schema = (form.get("json_schema") or {}).get("schema")
        return hashlib.sha256(orjson.dumps([form.get("type"), schema, tools, calls])).digest()

    @contextmanager
    def naming_grammar(self) -> Iterator[None]:
        """Raise FieldError where the sampler refuses, or gives up, a request that a grammar restricts.

        Its lengths and tokens were checked, and samplers go on: another one would do the same.
        """
        try:
            yield
        except (UserError, RequestGivenUpError) as error:
            field = self.request.restricted_by
            if field is None or isinstance(error, FieldError | NotFoundError):
                raise
            why = _GIVEN_UP if isinstance(error, RequestGivenUpError) else str(error)
            raise FieldError(f"{field}: the sampler makes no answer that fits it: {why}", field) from error

    def encoded(self, response: dict[str, Any]) -> bytes:
        """Encode a response, or a chunk of one, with all choices, under the client's name for the model."""
        if (copies := self.request.n // self.request.sequences) > 1:
            response = repeated(response, copies)
        return orjson.dumps(response | {"model": self.request.model} if "model" in response else response)

    def forwarded(self, chunk: Chunk) -> bytes | None:
        """Return the chunk without usage that the client did not request; None if nothing is left."""
        options = self.request.stream_options
        if chunk.get("choices"):
            chunk.pop("usage", None)
        elif "usage" in chunk and (options is None or not options.include_usage):
            return None
        return self.encoded(chunk)
