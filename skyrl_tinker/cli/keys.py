"""`skyrl-tinker keys`: API keys, in the database of a server that may be running or not."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_tinker import config
from skyrl_tinker.cli.database import existing_database
from skyrl_tinker.cli.options import Config, DatabaseUrl, Home, one_line_errors

if TYPE_CHECKING:  # the other commands need none of its imports
    from sqlalchemy import Connection

    from skyrl_tinker.store.database.group_commit import Op, T

app = typer.Typer(no_args_is_help=True, help="API keys.", rich_markup_mode=None)


@app.command()
def create(
    name: Annotated[str, typer.Option(help="The holder's name, as `tinker auth whoami` shows it")],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Let it own all that was made without a key")
    ] = False,
    home: Home = None,
    database_url: DatabaseUrl = None,
    config_file: Config = None,
) -> None:
    """Make an API key and print it. It is shown only this once.

    From the first key on, the server requires one of every client, even when all are revoked; a running
    server does so within a second. Each key sees only the sessions, training runs and checkpoints that were
    made with it. Those from before the first key are visible only to a key that adopts them.
    """
    from skyrl_tinker.directories import Directories
    from skyrl_tinker.store import api_keys, owners
    from skyrl_tinker.store.database.migrate import migrate
    from skyrl_tinker.store.store import write_once

    def create_key(conn: "Connection") -> tuple[str, int, int]:
        key = api_keys.create(conn, name)
        adopted = owners.adopt(conn, api_keys.live_id(conn, name)) if adopt else 0
        return key, adopted, owners.count_ownerless(conn)

    with one_line_errors():
        settings = config.load(config_file, home=home, database_url=database_url)
        Directories(settings).make()
        migrate(settings.store_url, settings.root)
        key, adopted, left = write_once(settings.store_url, create_key)
    print(key)
    print("shown only now: store it, for example as TINKER_API_KEY", file=sys.stderr)
    if adopt:
        print(f"it owns the {adopted} session(s) that were made without a key", file=sys.stderr)
    elif left:
        print(
            f"no key sees the {left} session(s) that were made without one; a key made with --adopt does",
            file=sys.stderr,
        )


@app.command(name="list")
def list_keys(home: Home = None, database_url: DatabaseUrl = None, config_file: Config = None) -> None:
    """List every key: id, name, time of creation and of revocation."""
    from skyrl_tinker.store import api_keys

    with one_line_errors():
        rows = _run(home, database_url, config_file, api_keys.list_keys)
    for row in rows:
        ended = "live" if row.revoked_at is None else f"revoked {_utc(row.revoked_at)}"
        print(f"{row.id:>4}  {row.name:<32}  made {_utc(row.created_at)}  {ended}")
    if not rows:
        print("no keys", file=sys.stderr)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID_OR_NAME")],
    home: Home = None,
    database_url: DatabaseUrl = None,
    config_file: Config = None,
) -> None:
    """Revoke a key and its tokens permanently. What it made is kept, but no longer visible to any client.

    A running server refuses the key within a second.
    """
    from skyrl_tinker.store import api_keys

    with one_line_errors():
        row = _run(home, database_url, config_file, lambda conn: api_keys.revoke(conn, key))
    print(f"revoked: {row.id} {row.name}")


def _run(home: Path | None, database_url: str | None, config_file: Path | None, op: "Op[T]") -> "T":
    """Run an operation on a database that exists; raises StartupError when it does not."""
    from skyrl_tinker.store.database.migrate import migrate
    from skyrl_tinker.store.store import write_once

    settings = config.load(config_file, home=home, database_url=database_url)
    url = existing_database(settings)
    migrate(url, settings.root)
    return write_once(url, op)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
