"""Facts of `serve` and the engine for the API (base models, "engine", a warning), and counters of all."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, bindparam, case, insert, select, update

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Model, SamplingSession, SavedCheckpoint, ServerState

BASES = "base_models"
"""Key of the facts of the base models that are served, see `get_bases`."""
TRAINED = "trained_base_model"
"""Key of the fingerprints of the base models that were trained, by name, or that of the one."""
WARNING = "warning"
"""Key of a warning to all users: text, or None."""

ENGINE_ADDRESS = "engine_address"
"""Key of HOST:PORT by which API processes on other hosts reach the engine; None: by none."""
LEASE = "lease"
"""Key of the lease of the server that works on the database."""
IDENTITY = "identity"
"""Key of a random text that tells this database from others."""
SECRETS = "secrets"
"""Key of the fingerprint of the signing secrets."""
SETTINGS = "settings"
"""Key of the server's settings, which API processes on other hosts take over."""
EXPECTED = "expected"
"""Key of which training requests are on their way, see store.futures.expected_requests."""
GAPS = "gaps"
"""Key of when the engine last wrote that it looks at missing requests: that the database takes writes."""
SERVER = "server"
"""Key of `serve` itself: its pid, and when it was started."""
_FACTS = TypeAdapter(tuple[BaseModelFacts, ...])
_GET = Prepared(select(ServerState.value).where(ServerState.key == bindparam("key")))
_CHANGE = Prepared(
    update(ServerState).where(ServerState.key == bindparam("of")).values(value=bindparam("value"))
)
_ADD = Prepared(insert(ServerState), ("key", "value"))


def put(conn: Connection, key: str, value: Any) -> None:
    """Set `key` to any JSON value."""
    if not _CHANGE.change(conn, {"of": key, "value": value}):
        _ADD.change(conn, {"key": key, "value": value})


def identity(conn: Connection) -> str:
    """Return the database's, which is drawn at the first call."""
    drawn: str | None = get(conn, IDENTITY)
    if drawn is None:
        drawn = secrets.token_hex(16)
        put(conn, IDENTITY, drawn)
    return drawn


def get(conn: Connection, key: str) -> Any | None:
    """Return the value, None if it was never set."""
    row = _GET.row(conn, {"key": key})
    return None if row is None else row.value


def put_bases(conn: Connection, bases: Bases) -> None:
    """Set the base models that are served, and have rows name each by its canonical name.

    Rows of older servers have the names that clients used, those from before `model_name` was changed the
    former canonical one.
    """
    before = get_bases(conn)
    put(conn, BASES, [asdict(facts) for facts in bases.all])
    former = {} if before is None else {facts.directory: facts.name for facts in before.all}
    now = {facts.directory: facts.name for facts in bases.all}
    names = {name: facts.name for facts in bases.all for name in facts.names[1:]}
    names |= {name: now[each] for each, name in former.items() if each in now}
    gone = {name for each, name in former.items() if each not in now}  # rows with it are not told apart yet
    rename_bases(conn, {old: new for old, new in names.items() if new not in gone})


def rename_bases(conn: Connection, names: Mapping[str, str]) -> None:
    """Have all that names a base model by a key of `names` name it by the value."""
    trained = get(conn, TRAINED)
    if isinstance(trained, dict):
        put(conn, TRAINED, {names.get(name, name): fingerprint for name, fingerprint in trained.items()})
    changed = {old: new for old, new in names.items() if old != new}
    for table in (Model, SamplingSession, SavedCheckpoint) if changed else ():
        new = case(changed, value=table.base_model)
        conn.execute(update(table).where(table.base_model.in_(changed)).values(base_model=new))


def get_bases(conn: Connection) -> Bases | None:
    """Return the base models that are served, None before a server has started."""
    value = get(conn, BASES)
    return None if value is None else Bases(_FACTS.validate_python(value))
