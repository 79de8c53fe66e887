"""Tokens of one datum or sampled sequence, with the values of each."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Datum
from skyrl_tinker.errors import GoneError, NotFoundError, UserError
from skyrl_tinker.protocol.protobuf import pass_requests, pass_results, sample_results
from skyrl_tinker.protocol.schemas.console import TokensResponse
from skyrl_tinker.store.console.readable_requests import StoredTokens

if TYPE_CHECKING:  # few requests need its import, which takes time at each start
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
Values = Sequence[float | None]


def tokens_of(stored: StoredTokens, item: int, bases: Bases) -> TokensResponse:
    """Build the view. Raises UserError for an item that there is not, GoneError when the body is dropped."""
    if stored.kind is RequestKind.SAMPLE:
        sequences = sample_results.sample_response_json(stored.result)["sequences"]
        _check(item, len(sequences))
        sequence = sequences[item]
        sampled: dict[str, Values] = {"logprob": _finite(sequence["logprobs"])}
        return _response(stored, item, len(sequences), sequence["tokens"], sampled, bases)
    if stored.body is None:
        raise GoneError("the body of this request is dropped: a snapshot of its model holds its effect")
    datum, count = pass_requests.datum_at(stored.body, item)
    _check(item, count)
    assert datum is not None
    if datum.target_tokens.ndim != 1:
        raise UserError(
            f"item: found {item}, whose positions have several candidates, expected one target each"
        )
    values = _values(datum, pass_results.logprobs_at(stored.result, item))
    return _response(stored, item, count, datum.target_tokens.tolist(), values, bases)


def _values(datum: Datum, logprobs: Sequence[float]) -> dict[str, Values]:
    """Return the trainer's logprob of each target, the inputs of the loss, and trainer minus sampler."""
    inputs = {
        name: _finite(array.tolist())
        for name, array in datum.inputs.items()
        if array.shape == datum.target_tokens.shape
    }
    values: dict[str, Values] = {"logprob": _finite(logprobs), **inputs}
    if (sampled := values.pop("logprobs", None)) is not None:
        trained = values.get("advantages", sampled)
        cells = zip(values["logprob"], sampled, trained, strict=True)
        values |= {"sampled logprob": sampled, "difference": [_difference(*cell) for cell in cells]}
    return values


def _difference(logprob: float | None, sampled: float | None, trained: float | None) -> float | None:
    """Return trainer minus sampler; None where nothing was sampled, as in a prompt."""
    return None if logprob is None or sampled is None or not trained else logprob - sampled


def _response(
    stored: StoredTokens,
    item: int,
    items: int,
    tokens: Sequence[int],
    values: Mapping[str, Values],
    bases: Bases,
) -> TokensResponse:
    return TokensResponse(
        kind=stored.kind,
        item=item,
        items=items,
        tokens=list(tokens),
        texts=split_tokens(tokens, Path(bases.require(stored.base_model).directory)),
        values={name: list(column) for name, column in values.items()},
    )


def _check(item: int, count: int) -> None:
    if item >= count:
        raise UserError(f"item: found {item}, expected a number below {count}")


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def split_tokens(tokens: Sequence[int], directory: Path) -> list[str]:
    """Return the text that each token adds; of a character in several tokens, the last one has it.

    Call it in a thread: it reads the tokenizer of the model in `directory` when it first needs it. Raises
    NotFoundError for a model without a fast tokenizer.
    """
    from tokenizers.decoders import DecodeStream

    stream, tokenizer = DecodeStream(skip_special_tokens=False), _tokenizer(directory / FILE)
    return [stream.step(tokenizer, token) or "" for token in tokens]


@cache
def _tokenizer(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    if not file.is_file():
        raise NotFoundError(f"the base model has no {FILE}, so its tokens cannot be shown as text")
    return Tokenizer.from_file(str(file))
