"""`skyrl-tinker keys`: API keys, in the database of a server that may be running or not."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from skyrl_tinker.cli.database import existing_database, told_if_new
from skyrl_tinker.cli.options import seconds, with_added, with_settings
from skyrl_tinker.config import Settings, description_of
from skyrl_tinker.protocol.validation.key_limits import KeyLimits, changes_of

if TYPE_CHECKING:  # the other commands need none of its imports
    from sqlalchemy import Connection

    from skyrl_tinker.store.api_keys import KeyRow
    from skyrl_tinker.store.database.group_commit import Op, T

_SHOWN_ONCE = "shown only now: store it, for example as TINKER_API_KEY"
app = typer.Typer(
    no_args_is_help=True, help="Make, list, limit, rotate and revoke API keys.", rich_markup_mode=None
)


Which = Annotated[str, typer.Argument(metavar="ID_OR_NAME")]
Duration = Annotated[
    int | None,
    typer.Option(parser=seconds, metavar="DURATION", help="End the key so long from now, as in 12h or 90d"),
]

Limits = {
    name: Annotated[
        str | None,
        typer.Option(metavar="NUMBER|none|default", show_default=False, help=description_of(field)),
    ]
    for name, field in KeyLimits.model_fields.items()
}


@app.command()
@with_settings("home", "database_url")
def create(
    settings: Settings,
    name: Annotated[str, typer.Option(help="The holder's name, as `tinker auth whoami` shows it")],
    admin: Annotated[bool, typer.Option("--admin", help="Let it see the work of all keys")] = False,
    expires_in: Duration = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Let it own all that was made without a key")
    ] = False,
) -> None:
    """Make an API key and print it. It is shown only this once.

    From the first key on, the server requires one of every client, even when all are revoked; a running
    server does so within a second. Each key sees only the sessions, training runs and checkpoints that were
    made with it. Those from before the first key are visible only to a key that adopts them.

    An admin key sees those of all, and may cancel samples, unload models, finish sessions and delete
    checkpoints; its own work belongs to it, and it trains and samples with nobody else's.
    """
    from skyrl_tinker.directories import Directories
    from skyrl_tinker.store import api_keys, owners
    from skyrl_tinker.store.database.migrate import migrate
    from skyrl_tinker.store.store import write_once

    def create_key(conn: "Connection") -> tuple[str, int, int]:
        key = api_keys.create(conn, name, expires_at=_from_now(conn, expires_in), admin=admin)
        adopted = api_keys.adopt(conn, name, api_keys.NO_KEY) if adopt else 0
        return key, adopted, owners.count_ownerless(conn)

    with told_if_new(settings):
        Directories(settings).make()
        migrate(settings.store_url, settings.root)
        key, adopted, left = write_once(settings.store_url, create_key)
    print(key)
    print(f"a key of the server with home {settings.root}, {_SHOWN_ONCE}", file=sys.stderr)
    if adopt:
        print(f"it owns the {adopted} session(s) that were made without a key", file=sys.stderr)
    elif left:
        print(
            f"only admin keys see the {left} session(s) that were made without one; a key made with --adopt "
            "owns them",
            file=sys.stderr,
        )


@app.command(name="list")
@with_settings("home", "database_url")
def list_keys(settings: Settings) -> None:
    """List every key: id, name, creation, last use (to a minute), whether it is live, and its rights."""
    from skyrl_tinker.store import api_keys

    now, rows = _run(settings, lambda conn: (_from_now(conn, 0), api_keys.list_keys(conn)))
    for row in rows:
        used = "never used" if row.last_used_at is None else f"used {_utc(row.last_used_at)}"
        print(f"{row.id:>4}  {row.name:<32}  made {_utc(row.created_at)}  {used:<25}  {_state(row, now)}")
    if not rows:
        print("no keys", file=sys.stderr)


@app.command()
@with_settings("home", "database_url")
def rotate(
    settings: Settings,
    key: Which,
    overlap: Annotated[
        int,
        typer.Option(
            parser=seconds,
            metavar="DURATION",
            help="Time that the old secret stays valid, as in 15m, at most 7d; 0 for one that leaked",
        ),
    ] = "1h",  # type: ignore[assignment]  # the parser reads the default, too
    expires_in: Duration = None,
) -> None:
    """Give a key a new secret and print it. Its holder keeps everything: sessions, runs, checkpoints.

    Secrets from before the old one end at once, and tokens end with the secret that they were issued for.
    """
    from skyrl_tinker.store import api_keys

    def rotate_key(conn: "Connection") -> tuple[str, float]:
        secret = api_keys.rotate(conn, key, overlap, expires_at=_from_now(conn, expires_in))
        return secret, _from_now(conn, overlap)

    secret, until = _run(settings, rotate_key)
    print(secret)
    print(_SHOWN_ONCE, file=sys.stderr)
    print(f"the old one ends at {_utc(until)} at the latest", file=sys.stderr)


@app.command()
@with_settings("home", "database_url")
def revoke(settings: Settings, key: Which) -> None:
    """Revoke a key and its tokens permanently. Its work is kept, and visible only to admin keys.

    A running server refuses the key within a second. `keys adopt` gives its work to another key.
    """
    from skyrl_tinker.store import api_keys

    row = _run(settings, lambda conn: api_keys.revoke(conn, key))
    print(f"revoked: {row.id} {row.name}")


@app.command()
@with_settings("home", "database_url")
def adopt(
    settings: Settings,
    key: Which,
    former: Annotated[
        str, typer.Option("--from", metavar="KEY", help="A revoked or expired key, by id or name, or `none`")
    ],
) -> None:
    """Give a live key all that a revoked or expired one made: sessions, runs, checkpoints, usage.

    With `--from none` the work done without a key.
    """
    from skyrl_tinker.store import api_keys

    count = _run(settings, lambda conn: api_keys.adopt(conn, key, former))
    of = "made without a key" if former == api_keys.NO_KEY else f"of key {former}"
    print(f"adopted: {count} session(s) {of}")


@app.command()
@with_settings("home", "database_url")
def purge(
    settings: Settings,
    key: Annotated[str, typer.Argument(metavar="ID_OR_NAME", help="A revoked or expired key")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
) -> None:
    """Delete the work of a revoked or expired key: sessions, runs, checkpoints, metadata. This is final.

    Also published checkpoints, which others use. Metadata goes at once, files and rows within minutes on a
    running server; rows of checkpoints, and of models in training, as long after as those of others.
    """
    from skyrl_tinker.store import api_keys
    from skyrl_tinker.store.retention import key_purges

    former = _run(settings, lambda conn: api_keys.find_dead(conn, key))
    if not yes:
        typer.confirm(f"delete all that key {former.id} ({former.name}) made?", abort=True)
    sessions, checkpoints = _run(settings, lambda conn: key_purges.purge_key(conn, str(former.id)))
    print(f"purged: {sessions} session(s), {checkpoints} checkpoint(s)")


@app.command()
@with_settings("home", "database_url")
def rotate_secrets(settings: Settings) -> None:
    """Replace the secrets that sign tokens and download URLs. API keys stay valid.

    A running server refuses the old ones within a second: the SDK fetches a new token and goes on; downloads
    that are under way finish, and URLs that were handed out must be requested again.
    """
    from skyrl_tinker.store import audit_log, server_state
    from skyrl_tinker.store.cluster import signing_secrets

    _run(settings, lambda conn: audit_log.record_key(conn, "secrets_rotate", None))
    fresh = signing_secrets.rotate(settings.root)
    _run(settings, lambda conn: server_state.put(conn, server_state.SECRETS, fresh.fingerprint))
    print("rotated: tokens and download URLs from before are refused")


@app.command()
@with_settings("home", "database_url")
@with_added(Limits)
def limit(settings: Settings, key: Which, **limits: str | None) -> None:
    """Give one key limits of its own, and print them: a number, `none`, or `default` for that of all keys.

    A running server keeps to them within a second. A key keeps the work that it has already. For example:

    \b
      skyrl-tinker keys limit alice --models 4 --stored-gb 200 --sessions default
    """
    from skyrl_tinker.store import api_keys

    changes = changes_of({name: text for name, text in limits.items() if text is not None})
    now = _run(settings, lambda conn: api_keys.limit(conn, key, changes))
    print(", ".join(_limits(now)) or "the limits of all keys (setting keys)")


def _limits(limits: Mapping[str, Any]) -> list[str]:
    return [f"{name} {'none' if value is None else f'{value:g}'}" for name, value in limits.items()]


def _run(settings: Settings, op: "Op[T]") -> "T":
    """Run an operation on a database that exists; raises StartupError when it does not."""
    from skyrl_tinker.store.database.migrate import migrate
    from skyrl_tinker.store.store import write_once

    url = existing_database(settings)
    migrate(url, settings.root)
    return write_once(url, op)


@overload
def _from_now(conn: "Connection", seconds: int) -> float: ...
@overload
def _from_now(conn: "Connection", seconds: int | None) -> float | None: ...
def _from_now(conn: "Connection", seconds: int | None) -> float | None:
    from skyrl_tinker.store.database.rows import database_time

    return None if seconds is None else database_time(conn) + seconds


def _state(row: "KeyRow", now: float) -> str:
    parts = ["admin"] if row.admin else []
    if row.revoked_at is not None:
        return " ".join([f"revoked {_utc(row.revoked_at)}", *parts])
    if row.expires_at is not None:
        parts.insert(0, f"{'expires' if now < row.expires_at else 'expired'} {_utc(row.expires_at)}")
    if row.previous_until is not None and now < row.previous_until:
        parts.append(f"old secret until {_utc(row.previous_until)}")
    parts += _limits(row.limits or {})
    return " ".join(["live", *parts] if row.is_live(now) else parts)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
