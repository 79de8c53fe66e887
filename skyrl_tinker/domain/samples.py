"""Plain values of samples: requests, parameters and outputs. As those of `values`."""

from dataclasses import dataclass
from typing import Literal

from skyrl_tinker.domain.values import RoutedExperts

SEEDS = 2**63
"""Number of seeds; a larger or negative one is reduced modulo this."""


def generated(samples: int, temperature: float) -> int:
    """Count the sequences that are generated for so many samples: greedy ones are all the same."""
    return 1 if temperature == 0 else samples


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`stop`: None = EOS, () = never stop, ints = token ids (and EOS), strings = stop strings."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class TargetTokens:
    """Tokens to score: a matrix [len(prompt) - 1, K] whose row i belongs to prompt position i + 1.

    Dense: `tokens` is all of it, row by row. CSR (`crow` and `col` set): `tokens` are the listed cells.
    A token of -1 stands for nothing.
    """

    shape: tuple[int, int]
    tokens: tuple[int, ...]
    crow: tuple[int, ...] | None = None  # [rows + 1]
    col: tuple[int, ...] | None = None  # [len(tokens)]

    @property
    def distinct(self) -> list[int]:
        return sorted({*self.tokens} - {-1})


LISTED_PER_PLACE = 2048
"""Logprobs of a prompt that take a sampler's API process as long as a sequence, 8 ms: in JSON.

It makes one answer after the other, so answers that list much are in flight few at a time. Those of sampled
tokens come with each step: they weigh where they are many at each. Arrays, from our own servers without a
router between, take a twelfth.
"""
LISTED_PER_STEP = 64
"""Logprobs that count as a sequence more where each sampled token of one lists so many."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A validated asample request.

    `prompt_logprobs_last_n`: prompt_logprobs and topk_prompt_logprobs score only the last n prompt tokens;
    None: all after the first. `record_stability_info`: provenance spans may refer to the samples.
    `routed_experts`: return the experts of prompts and samples.
    """

    prompt: tuple[int, ...]
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False
    routed_experts: bool = False

    @property
    def sequences(self) -> int:
        return generated(self.num_samples, self.params.temperature)

    def tokens(self, context_length: int) -> int:
        """Count the tokens of the prompt, and the most that may be generated in its places: its share."""
        left = max(0, context_length - len(self.prompt))
        most = left if self.params.max_tokens is None else self.params.max_tokens
        return len(self.prompt) + self.places * most

    @property
    def places(self) -> int:
        """Count the places that it takes among sequences in flight: more than it has if it lists much."""
        sampled = self.sequences * (1 + self.topk_sample_logprobs // LISTED_PER_STEP)
        return max(sampled, self.listed // LISTED_PER_PLACE)

    @property
    def listed(self) -> int:
        """Count the logprobs of its prompt that it lists."""
        targets = self.target_prompt_logprobs
        listed = len(self.prompt) * (self.topk_prompt_logprobs + self.prompt_alt_tokens_k)
        return listed + (len(targets.tokens) if targets else 0)


TopkRow = tuple[tuple[int, float], ...]
"""(token, logprob) of one position, the most likely first; () where nothing was scored."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Name of the weights that produced the tokens [start, end) of a sequence.

    An adapter's name, or that of the full weights ("base" for the base model).
    """

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SampledSequence:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    topk: tuple[TopkRow, ...] = ()  # [len(tokens)] when asked for
    versions: tuple[VersionSpan, ...] = ()  # in order, without gaps
    routed_experts: RoutedExperts | None = None
    """Of the prompt and the tokens but the last, which the model was not given; when asked for."""


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """Logprobs of target tokens, in the layout of the request."""

    targets: TargetTokens
    logprobs: tuple[float, ...]  # [len(targets.tokens)], 0.0 for a token of -1


@dataclass(frozen=True, slots=True)
class AltTokens:
    """k draws per prompt position after the first: both [len(prompt) - 1][k]."""

    k: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]  # raw, or at the temperature, as sampled_logprobs says


@dataclass(frozen=True, slots=True)
class SampleOutput:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: tuple[float, ...] | None = None  # [len(prompt)], NaN first
    cached_tokens: int = 0
    topk_prompt_logprobs: tuple[TopkRow, ...] | None = None  # [len(prompt)], () first
    target_prompt_logprobs: TargetLogprobs | None = None
    prompt_alt_tokens: AltTokens | None = None
    replicas: tuple[str, ...] = ()  # addresses of those that answered, where they say so
