"""Tokens of finished passes and samples, with their values and prompts, and the texts of each in a list."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.api.pass_heads import SHOWN, PassHeads
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Datum, Float32, Number
from skyrl_tinker.errors import GoneError, NotFoundError, UserError
from skyrl_tinker.protocol.protobuf import pass_requests, pass_results, sample_results
from skyrl_tinker.protocol.schemas.console import ItemsResponse, ItemSummary, ReadableSummary, TokensResponse
from skyrl_tinker.protocol.schemas.runs import Paging
from skyrl_tinker.protocol.stored_requests import sample_from_body
from skyrl_tinker.store.console.readable_requests import StoredTokens
from skyrl_tinker.store.database.rows import AnyRow

if TYPE_CHECKING:  # few requests need its import, which takes time at each start
    from tokenizers import Tokenizer

Values = Sequence[float | None]
COMPUTED = frozenset(("logprob", "sampled logprob", "difference"))
"""Columns of a datum that are no inputs of its loss."""
FILE = "tokenizer.json"


def request_summary(conn: Connection, row: AnyRow, bases: Bases, heads: PassHeads) -> ReadableSummary:
    """Return a request as one of a list. Tokens without text, as their base model is gone, are null."""
    told: dict[str, object] = dict.fromkeys(("prompt_id", "prompt", "loss_fn", "datums", "begins"))
    if row.readable and row.kind is not RequestKind.SAMPLE:
        told["loss_fn"], told["datums"], tokens = heads.of(conn, row)
        with suppress(NotFoundError, UserError):
            told["begins"] = _beginning(tokens, directory_of(row.base_model, bases))
    if row.prompt is not None:
        tokens = sample_from_body(row.prompt).prompt
        with suppress(NotFoundError, UserError):
            told["prompt_id"], told["prompt"] = prompt_of(tokens, directory_of(row.base_model, bases))
    return ReadableSummary(**{**row._mapping, **told})


def tokens_of(stored: StoredTokens, item: int, bases: Bases) -> TokensResponse:
    """Build the view. Raises UserError for an item that there is not, GoneError when the body is dropped."""
    if stored.kind is RequestKind.SAMPLE:
        sequences, count = sample_results.sequences_at(stored.result, item, 1)
        _check(item, count)
        sequence = sequences[0]
        sampled: dict[str, Values] = {"logprob": _finite(sequence["logprobs"])}
        prompt = _sample_prompt(stored)
        return _response(stored, item, count, prompt, sequence["tokens"], sampled, bases)
    data, count = pass_requests.data_at(_body(stored), item, 1)
    _check(item, count)
    datum = data[0]
    _require_single_targets(datum, item)
    values = _values(datum, pass_results.logprobs_at(stored.result, item))
    first = datum.tokens[:1].tolist()
    return _response(stored, item, count, first, datum.target_tokens.tolist(), values, bases)


def items_of(stored: StoredTokens, page: Paging, bases: Bases) -> ItemsResponse:
    """Summarize a page of items. Raises as `tokens_of`."""
    parts, total = (_sampled if stored.kind is RequestKind.SAMPLE else _trained)(stored, page)
    directory = directory_of(stored.base_model, bases)
    return ItemsResponse(
        kind=stored.kind,
        items=[_summary(page.offset + place, part, directory) for place, part in enumerate(parts)],
        total=total,
        earlier=stored.earlier,
        later=stored.later,
        run=stored.run,
        name=stored.name,
        step=stored.step,
        reported=dict(stored.reported),
    )


@dataclass(frozen=True, slots=True)
class _ScoredPart:
    """Trained or sampled part of an item. `prompt` None: it is not stored."""

    prompt: Sequence[int] | None
    tokens: Sequence[int]
    advantage: float | None
    logprob: float | None


def _sampled(stored: StoredTokens, page: Paging) -> tuple[list[_ScoredPart], int]:
    prompt = _sample_prompt(stored)
    shown, total = sample_results.sequences_at(stored.result, page.offset, page.limit)
    return [_ScoredPart(prompt, each["tokens"], None, _mean(each["logprobs"])) for each in shown], total


def _sample_prompt(stored: StoredTokens) -> Sequence[int] | None:
    """Return the prompt of a sample, None where it is not stored any more."""
    return None if stored.body is None else sample_from_body(stored.body).prompt


def _trained(stored: StoredTokens, page: Paging) -> tuple[list[_ScoredPart], int]:
    data, total = pass_requests.data_at(_body(stored), page.offset, page.limit)
    scored = islice(pass_results.each_logprobs(stored.result), page.offset, page.offset + len(data))
    pairs = enumerate(zip(data, scored, strict=True), page.offset)
    return [_trained_part(number, datum, logprobs) for number, (datum, logprobs) in pairs], total


def _trained_part(number: int, datum: Datum, logprobs: Float32) -> _ScoredPart:
    """Return the positions with an advantage, else with a weight, else all, and what lies between them."""
    _require_single_targets(datum, number)
    advantages, weights = (_of_targets(datum, name) for name in ("advantages", "weights"))
    trained = weights if advantages is None else advantages
    if trained is None or not trained.any():
        trained = np.ones(datum.target_tokens.shape, np.float32)
    places = np.flatnonzero(trained)
    first, end = int(places[0]), int(places[-1]) + 1
    return _ScoredPart(
        datum.tokens[: first + 1].tolist(),
        datum.target_tokens[first:end].tolist(),
        None if advantages is None else _mean(advantages[places]),
        _mean(logprobs[places]),
    )


def _of_targets(datum: Datum, name: str) -> Number | None:
    """Return an input with a number for each target; of a custom loss it may be one number for all of them.

    None: there is none, or it has another shape, which a custom loss may give it.
    """
    values, shape = datum.inputs.get(name), datum.target_tokens.shape
    if values is None or values.shape not in ((), shape):
        return None
    return values if values.ndim else np.full(shape, values, np.float32)


def _summary(item: int, part: _ScoredPart, directory: Path) -> ItemSummary:
    prompt_id, prompt = prompt_of(part.prompt, directory)
    return ItemSummary(
        item=item,
        prompt_id=prompt_id,
        prompt=prompt,
        text=_beginning(part.tokens, directory),
        tokens=len(part.tokens),
        advantage=part.advantage,
        logprob=part.logprob,
    )


def prompt_of(tokens: Sequence[int] | None, directory: Path) -> tuple[str | None, str | None]:
    """Return a name that is equal for equal prompts, and the end of the text, whole or behind an ellipsis."""
    if tokens is None:
        return None, None
    name = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:12]
    cut = "…" if len(tokens) > SHOWN else ""
    return name, cut + "".join(split_tokens(tokens[-SHOWN:], directory))


def _beginning(tokens: Sequence[int], directory: Path) -> str:
    """Return the text of the first tokens, with an ellipsis if there are others."""
    return "".join(split_tokens(tokens[:SHOWN], directory)) + ("…" if len(tokens) > SHOWN else "")


def _body(stored: StoredTokens) -> bytes:
    if stored.body is None:
        raise GoneError(
            "the data of this pass is no longer stored: only that of the newest passes of a run is, and what "
            "its model's next snapshot does not hold yet"
        )
    return stored.body


def _require_single_targets(datum: Datum, item: int) -> None:
    if datum.target_tokens.ndim != 1:
        raise UserError(
            f"item: found {item}, whose positions have several candidates, expected one target each"
        )


def directory_of(base_model: str, bases: Bases) -> Path:
    return Path(bases.require(base_model).directory)


def _mean(values: Sequence[float] | Number) -> float | None:
    mean = float(np.mean(values)) if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def _values(datum: Datum, logprobs: Sequence[float]) -> dict[str, Values]:
    """Return the trainer's logprob of each target, the inputs of the loss, and trainer minus sampler.

    Inputs of a custom loss may have any name.
    """
    inputs = {
        f"{name} (input)" if name in COMPUTED else name: _finite(array.tolist())
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
    prompt: Sequence[int] | None,
    tokens: Sequence[int],
    values: Mapping[str, Values],
    bases: Bases,
) -> TokensResponse:
    directory = directory_of(stored.base_model, bases)
    return TokensResponse(
        kind=stored.kind,
        item=item,
        items=items,
        prompt=None if prompt is None else "".join(split_tokens(prompt, directory)),
        tokens=list(tokens),
        texts=split_tokens(tokens, directory),
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
