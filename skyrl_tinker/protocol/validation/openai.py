"""OpenAI's requests: refused at once, before anything is fetched, counted or sampled for them."""

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.errors import NotSupportedError
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import CompletionRequest, FieldError, OpenAIRequest


def check_openai(request: OpenAIRequest, sampler: SamplerAbilities) -> None:
    """Raise FieldError for a request that the sampling engine would not run as asked."""
    completed = request.max_tokens if isinstance(request, CompletionRequest) else None
    if refusal := sampler.refusal(request.temperature, request.stop, completed):
        raise FieldError(refusal, refusal.partition(":")[0])
    for ability, (field, given) in _asked(request).items():
        try:
            sampler.require([ability] if given else ())
        except NotSupportedError as error:
            raise FieldError(f"{field}: {error}" if ability != field else str(error), field) from error


def _asked(request: OpenAIRequest) -> dict[str, tuple[str, bool]]:
    """Return, by ability, the field that needs it, and whether it is given so that it does."""
    asked = {"seed": ("seed", request.seed is not None)}
    if isinstance(request, ChatCompletionRequest):
        return asked | {
            "response_format": ("response_format", request.response_format is not None),
            "streamed_chat_logprobs": ("logprobs", request.stream and request.logprobs),
            "tool_parser": ("tools", bool(request.tools)),
            "strict_tools": ("tools", request.calls_strictly),
            "parallel_tool_calls": ("parallel_tool_calls", request.calls_once),
            "reasoning_parser": ("separate_reasoning", bool(request.separate_reasoning)),
        }
    if isinstance(request, CompletionRequest):
        asked["add_special_tokens"] = ("add_special_tokens", not request.add_special_tokens)
    return asked
