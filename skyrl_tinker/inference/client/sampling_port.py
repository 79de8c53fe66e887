"""Port of a sampling engine, as far as engines differ: the dialect in which its servers are spoken to."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from skyrl_tinker.domain.values import SampleRequest
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.generated import SamplerResponse

Json = Mapping[str, Any]
Post = Callable[[str, Json], Awaitable[Any]]
"""A call of a route with a body, which returns the answer."""


class Dialect(Protocol):
    """Requests for samples and their answers. Frozen and picklable."""

    @property
    def path(self) -> str:
        """The route of samples."""
        ...

    @property
    def trial(self) -> Json:
        """Body of a sample whose answer tells what the server was started with."""
        ...

    def body(
        self,
        model: str,
        request: SampleRequest,
        *,
        eos: Sequence[int],
        context: int,
        attempt: str,
        priority: int,
    ) -> dict[str, Any]:
        """Make a request, by whose `attempt` SamplerControl ends it; the lowest `priority` goes first.

        UserError when the prompt leaves no room for a token.
        """
        ...

    def headers(self, request: SampleRequest, attempt: str, *, straight: bool) -> dict[str, str]:
        """Return the headers of such a request. `straight`: no router is between."""
        ...

    def parse(
        self, answer: Json, request: SampleRequest, *, switched: bool, replica: str | None
    ) -> SamplerResponse:
        """Read an answer.

        SamplerError when a prompt was not scored although nothing was aborted; UserError for weights that
        give no numbers.
        """
        ...

    def refusal(self, status: int, message: str) -> UserError | SamplerError:
        """Return the error that an error status means."""
        ...

    def logprobs_mode(self, answer: Json) -> Literal["raw", "processed"] | None:
        """Tell by the answer to `trial`; None where the weights give no numbers."""
        ...

    def lists_experts(self, answer: Json) -> bool:
        """Tell by the answer to `trial` whether answers list routed experts."""
        ...

    async def tokenize(self, post: Post, text: Json) -> list[int]:
        """Turn {"prompt"} or {"messages"}, with options, into tokens."""
        ...

    async def detokenize(self, post: Post, tokens: Sequence[int]) -> str: ...
