"""How an aborted sequence goes on.

It continues after its last token, with the logprobs it has. Three things make that more than a longer prompt:

* A seeded sequence cannot take up its random numbers in the middle. When nothing but a pause aborted it, it
  starts over and comes out as if never interrupted. When its policy was switched (ControlPlane.abort), there
  is nothing to reproduce, and starting over at each switch it might never end: it continues, its further
  random numbers drawn from a seed made of its own seed and the number of tokens it has.
* vLLM looks for stop strings in the text of one request only. So the tokens kept are the longest prefix whose
  text does not end in the beginning of a stop string; what follows is sampled again.
* A sequence that was aborted with its last token already there has ended.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from skyrl_tinker.domain.values import SampleRequest
from skyrl_tinker.inference.client.vllm_requests import max_tokens, seed_of, stop_strings, without_scores
from skyrl_tinker.inference.client.vllm_responses import GeneratedSequence

TextOf = Callable[[tuple[int, ...]], Awaitable[str]]
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How the tokenizer writes the first bytes of a character whose others are missing."""
LONGEST_INCOMPLETE = 3  # bytes, and so tokens at most
CONTEXT_TOKENS = 8
"""Of the prompt, shown to the tokenizer before the kept tokens: some write a first token differently."""


async def kept(
    request: SampleRequest, aborted: GeneratedSequence, *, switched: bool, text_of: TextOf
) -> GeneratedSequence:
    """What stays of an aborted sequence. `switched`: its policy was replaced."""
    if request.params.seed is not None and not switched:
        return aborted.first(0)
    stops = stop_strings(request.params.stop)
    if not stops:
        return aborted
    before = request.prompt[-CONTEXT_TOKENS:]
    skipped = len(await text_of(before))
    count = len(aborted.tokens)
    while count and _open(await text_of(before + aborted.tokens[:count]), skipped, stops):
        count -= 1
    return aborted.first(count)


def _open(text: str, skipped: int, stops: tuple[str, ...]) -> bool:
    """Whether a stop string may have begun at the end of text[skipped:]."""
    own = text[skipped:]
    ending = len(own) - len(own.rstrip(INCOMPLETE))
    if 0 < ending <= LONGEST_INCOMPLETE and not all(stop.isascii() for stop in stops):
        return True
    return any(own.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def remainder(
    request: SampleRequest, index: int, kept: GeneratedSequence, *, context: int
) -> SampleRequest | None:
    """The request for what follows the kept tokens of sample `index`; None when nothing is to follow."""
    done = len(kept.tokens)
    left = max_tokens(request, context) - done
    if left < 1:
        return None
    params = replace(request.params, max_tokens=left, seed=seed_of(request.params, index, done))
    return replace(without_scores(request), prompt=request.prompt + kept.tokens, num_samples=1, params=params)
