"""Finished passes and samples as a list has them, with the texts by which one knows them."""

from contextlib import suppress

from sqlalchemy import Connection

from skyrl_tinker.api.pass_heads import PassHeads
from skyrl_tinker.api.resources.token_view import directory_of, prompt_of, split_tokens
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.protocol.schemas.console import ReadableSummary
from skyrl_tinker.protocol.stored_requests import sample_from_body
from skyrl_tinker.store.database.rows import AnyRow


def request_summary(conn: Connection, row: AnyRow, bases: Bases, heads: PassHeads) -> ReadableSummary:
    """Return a request as one of a list. Tokens without text, as their base model is gone, are null."""
    told: dict[str, object] = dict.fromkeys(("prompt_id", "prompt", "loss_fn", "datums", "begins"))
    if row.readable and row.kind is not RequestKind.SAMPLE:
        told["loss_fn"], told["datums"], tokens = heads.of(conn, row)
        with suppress(NotFoundError, UserError):
            told["begins"] = "".join(split_tokens(tokens, directory_of(row.base_model, bases)))
    if row.prompt is not None:
        tokens = sample_from_body(row.prompt).prompt
        with suppress(NotFoundError, UserError):
            told["prompt_id"], told["prompt"] = prompt_of(tokens, directory_of(row.base_model, bases))
    return ReadableSummary(**{**row._mapping, **told})
