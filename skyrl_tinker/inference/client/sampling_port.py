"""Port of a sampling engine: the requests to its servers and the control of them, which differ by engine."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.fan_out import Locate
from skyrl_tinker.inference.client.generated import SamplerResponse
from skyrl_tinker.inference.client.http_connection import JsonHttp
from skyrl_tinker.inference.client.in_flight import InFlight

PauseMode = Literal["abort", "wait", "keep"]
Json = Mapping[str, Any]
Post = Callable[[str, Json], Awaitable[Any]]
"""(route, body) -> answer."""
AnswerReader = Callable[[dict[str, Any]], dict[str, Any]]
"""OpenAI answer of the engine -> the answer that clients get, with reasoning under both names."""


class SamplerControl(Protocol):
    """Control plane: calls that reach all replicas concurrently. FanOut describes those of all engines."""

    server_urls: tuple[str, ...]
    http: JsonHttp
    in_flight: InFlight
    patience_s: float

    def replica(self, url: str) -> "SamplerControl": ...
    async def world_sizes(self) -> tuple[int, ...]: ...
    async def world_size(self) -> int: ...
    async def load_adapter(self, name: str, path: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def adapters(self) -> list[str]: ...
    async def max_model_len(self) -> int: ...
    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Pause all replicas or none.

        abort: running sequences end as aborted; wait: they finish first; keep: they are suspended.
        clear_cache False keeps KV entries of the old weights: only right if weights do not change.
        """

    async def resume(self) -> None:
        """Resume all replicas, paused or not. One failure does not stop the others."""

    async def is_paused(self) -> bool:
        """Return whether all replicas are paused. Raises SamplerError if only some are."""

    async def abort(self, tag: str) -> None: ...
    async def interrupt(self, model: str) -> None: ...
    async def abort_tagged(self) -> None: ...
    async def sleep(self, level: int = 1, mode: PauseMode = "keep") -> None:
        """Pause as `pause` does, drop the cache, and free GPU memory: all replicas or none.

        Level 1 moves the weights to host memory, 2 drops them; 0 frees nothing. On CPU no level frees memory.
        """

    async def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None:
        """Move these, or all, back into GPU memory; requests go on when all of it is there."""

    async def is_sleeping(self) -> bool:
        """Return whether all replicas are asleep. Raises SamplerError if only some are."""

    async def reset_prefix_cache(self) -> None:
        """Empty the cache on all replicas, offloaded parts included; running sequences are computed again."""

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group and free its memory; harmless without a group."""

    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Send the replicas a part of the weights; a `directory` in it is on this host."""

    async def finish_weight_update(self, version: str) -> None: ...
    async def weight_version(self) -> str:
        """Return the version of the full weights of all replicas; START_VERSION until an update."""

    async def set_weight_version(self, version: str) -> None:
        """Set the version that `weight_version` returns; the weights stay."""

    async def health(self) -> None: ...
    async def require_arguments(self, *, keeps_cache: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Advice:
    """Arguments that give a server each of these; `{}` stands for the value.

    `pull`: those for a server that gets weights of this host.
    """

    routes: str
    pull: str
    context: str
    logprobs: str
    experts: str


class Dialect(Protocol):
    """Requests for samples, their answers, and the control plane. Frozen and picklable.

    `path`: the route of samples, `channels`: whether it may be a WebSocket, too; `most_sequences`: of one
    request. `core_path`: a route that the engine core answers, between two steps. `trial`: body of a sample
    whose answer shows the server's arguments: `logprobs_mode` (None if the weights give no finite numbers)
    and `lists_experts`. `advice`: arguments to recommend for an external server. `pull_probe`: a path that
    answers 204 if a server on another host can get weights; None: none can. `metrics_prefix`: of the engine's
    metrics; the others are of its process and web server. `unbounded_metrics`: metrics labelled with adapter
    names, which are new with each version.
    """

    @property
    def path(self) -> str: ...
    @property
    def channels(self) -> bool: ...
    @property
    def most_sequences(self) -> int: ...
    @property
    def core_path(self) -> str: ...
    @property
    def trial(self) -> Json: ...
    @property
    def advice(self) -> Advice: ...
    @property
    def pull_probe(self) -> str | None: ...
    @property
    def metrics_prefix(self) -> str: ...
    @property
    def unbounded_metrics(self) -> frozenset[str]: ...
    def logprobs_mode(self, payload: Json) -> Literal["raw", "processed"] | None: ...
    def lists_experts(self, payload: Json) -> bool: ...

    def body(self, model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
        """Make the body of a request. Raises UserError if the prompt leaves no room for a token."""

    def call(
        self, request: SampleRequest, attempt: str, priority: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return further fields of the request's body, and its headers.

        SamplerControl ends it by its id `attempt`; the lowest `priority` goes first.
        """

    def openai_body(self, given: Json, model: str, priority: int) -> dict[str, Any]:
        """Return an OpenAI request in the engine's form; only its `stop` and `stop_token_ids` end it."""

    def openai_reader(self, request: Json) -> AnswerReader:
        """Return the reader of the answer to an OpenAI request, or of the chunks of its stream."""

    def parse(
        self, payload: Json, request: SampleRequest, *, model: str, switched: bool, replica: str | None
    ) -> SamplerResponse:
        """Read an answer.

        Raises SamplerError if a prompt was not scored although nothing was aborted, UserError for weights
        that give no finite numbers.
        """

    def refusal(self, status: int, message: str) -> UserError | SamplerError:
        """Return the error for an error status and its message."""

    async def detokenize(self, post: Post, tokens: Sequence[int]) -> str: ...
    def control(
        self, server_urls: tuple[str, ...], http: JsonHttp, in_flight: InFlight, *, locate: Locate
    ) -> SamplerControl: ...
