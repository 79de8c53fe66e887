"""Sampling parameters and their rules, declared once for asample and for OpenAI's clients."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from skyrl_tinker.domain.values import SEEDS
from skyrl_tinker.protocol.schemas.base import MAX_INT32, StrictInt

MAX_STOPS = 1024
"""Most stop strings or tokens: the sampler looks for each of them after every token."""


MaxTokens = Annotated[StrictInt, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[
    StrictInt,
    Field(ge=-1, le=MAX_INT32, description="-1 or 0: no limit"),
    AfterValidator(lambda top_k: top_k or -1),
]
Seed = Annotated[StrictInt, AfterValidator(lambda seed: seed % SEEDS)]
"""Of up to 64 bits, signed ones too: taken modulo 2^63, so that -1 is 2^63 - 1."""


def check_stops(stops: Sequence[str | int]) -> None:
    """Raise ValueError for too many, or for an empty string."""
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} entries, expected at most {MAX_STOPS}")
    if "" in stops:
        raise ValueError("an empty text, expected at least one character")


def overflow(prompt_tokens: int, max_tokens: int, context: int) -> str:
    """Word the refusal of a request that exceeds the context."""
    return f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens > {context} (the setting context_length)"
