"""The kept part of an aborted sequence, and the request for the rest; without a server."""

from typing import Any
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.domain.samples import VersionSpan
from skyrl_tinker.inference.client.generated import REPLACEMENT, GeneratedSequence, resumable
from skyrl_tinker.inference.client.sample_parts import remainder
from tests.inference.support.samplers import ask

PIECES = ("", "x", "ab", "c", "<e", "nd", ">", "d", REPLACEMENT, "é")
"""The text of token i."""


async def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(PIECES[token] for token in tokens)


def aborted(*tokens: int) -> GeneratedSequence:
    return GeneratedSequence(tokens, (-1.0,) * len(tokens), "abort", (), (VersionSpan("v1", 0, len(tokens)),))


async def keep(tokens: tuple[int, ...], *, switched: bool = False, **params: Any) -> tuple[int, ...]:
    return (
        await resumable(ask((5, 6), **params), aborted(*tokens), switched=switched, text_of=text_of)
    ).tokens


async def test_a_sequence_goes_on_after_its_last_token() -> None:
    request = ask((5, 6), num_samples=2, max_tokens=10, prompt_logprobs=True, prompt_alt_tokens_k=2)
    whole = await resumable(request, aborted(7, 8), switched=False, text_of=text_of)
    rest = remainder(request, 1, whole.tokens, context=100)
    assert rest == ask((5, 6, 7, 8), max_tokens=8)


async def test_a_seeded_sequence_starts_over_after_a_pause_and_goes_on_after_a_switch() -> None:
    request = ask((5, 6), seed=3, max_tokens=10)
    assert await keep((1, 2), seed=3) == ()
    assert remainder(request, 2, (), context=100) == ask((5, 6), seed=5, max_tokens=10)
    assert await keep((1, 2), seed=3, switched=True) == (1, 2)
    rest = remainder(request, 2, (1, 2), context=100)
    assert rest is not None
    assert rest.params.seed not in (None, 5)
    assert rest == remainder(request, 2, (1, 2), context=100)
    assert rest.params.seed != remainder(request, 1, (1, 2), context=100).params.seed  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        ((1, 2, 3), ("zzz",), (1, 2, 3)),
        ((1, 2, 3, 4), ("<end>",), (1, 2, 3)),
        ((1, 2, 3, 4, 5), ("<end>",), (1, 2, 3)),
        ((1, 4, 7), ("<end>",), (1, 4, 7)),
        ((1, 2), ("bc",), (1,)),
        ((2, 2, 2), ("bab",), ()),
        ((1, 3), ("c",), (1, 3)),  # a stop of one letter has no beginning
        ((1, 3), ("zz", "cd"), (1,)),
        ((1, 8, 8), ("é",), (1,)),
        ((1, 8, 8), ("end",), (1, 8, 8)),
        ((1, 8, 8, 8, 8), ("é",), (1, 8, 8, 8, 8)),  # no character is that long
    ],
)
async def test_the_kept_text_never_ends_in_the_beginning_of_a_stop_string(
    tokens: tuple[int, ...], stops: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    assert await keep(tokens, stop=stops) == expected


@pytest.mark.parametrize("end", [(4,), (8,), (0,) * 200 + (4,), (4,) + (0,) * 200, (2, 2)])
async def test_of_a_long_sequence_the_end_alone_is_detokenized(end: tuple[int, ...]) -> None:
    asked, request = AsyncMock(wraps=text_of), ask((5, 6), stop=("<end>", "é"))
    tokens = (1, 3, 7) * 3000 + end
    kept = await resumable(request, aborted(*tokens), switched=False, text_of=asked)
    assert kept.tokens == (tokens if end == (2, 2) else tokens[: 9000 + end.index(max(end))])
    assert max(len(call.args[0]) for call in asked.call_args_list) < 1000


async def test_the_prompts_own_text_does_not_count_as_a_beginning() -> None:
    request = ask((1, 4), stop=("<en",))  # the prompt ends in "<e"
    assert (await resumable(request, aborted(0), switched=True, text_of=text_of)).tokens == (0,)


async def test_a_sequence_aborted_with_its_last_token_has_ended() -> None:
    assert remainder(ask((5, 6), max_tokens=2), 0, (1, 2), context=100) is None
    assert remainder(ask((5, 6), max_tokens=None), 0, (1, 2), context=4) is None


def test_joined_sequences_keep_logprobs_and_say_which_version_made_which_tokens() -> None:
    rest = GeneratedSequence((3,), (-3.0,), "stop", (), (VersionSpan("v2", 0, 1),))
    joined = aborted(1, 2).then(rest)
    assert (joined.tokens, joined.logprobs, joined.finish) == ((1, 2, 3), (-1.0, -1.0, -3.0), "stop")
    assert joined.versions == (VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 3))
    assert aborted(1, 2).then(aborted(3)).versions == (VersionSpan("v1", 0, 3),)
    assert joined.first(2).versions == (VersionSpan("v1", 0, 2),)
    assert joined.first(0) == GeneratedSequence((), (), "abort")
