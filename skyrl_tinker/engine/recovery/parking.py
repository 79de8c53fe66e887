"""Parked models: their state is kept, and a later start may bring them back.

Their requests fail with the reason, each at its turn, as any failed request.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.domain.weight_files import weight_files
from skyrl_tinker.store import checkpoint_records, model_records, server_state
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.model_records import ModelRow

_HEAD_BYTES = 1 << 20


def fingerprint(base_model: Path) -> str:
    """Return a digest of a base model: of its configuration, and its weight files' names, sizes and heads.

    Raises ValueError or OSError if these are not here, as while they are fetched.
    """
    digest = hashlib.sha256((base_model / "config.json").read_bytes())
    if not (files := weight_files(base_model)):
        raise ValueError(f"{base_model} has no weights yet")
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()


def sort_models(conn: Connection, fingerprints: Mapping[str, str | None]) -> int:
    """Park the models of other base models, and make those of the trained ones ready, parked or not.

    `fingerprints`: of the base models that are trained, by name; None where the files cannot be read: the
    last one counts, and until there is one, models that name it stay as they are. Returns the number of
    parked models.
    """
    before: dict[str, str | None] | str | None = server_state.get(conn, server_state.TRAINED)
    known = before if isinstance(before, dict) else dict.fromkeys([*fingerprints][:1], before)
    found = {name: fingerprint or known.get(name) for name, fingerprint in fingerprints.items()}
    trained = {name: fingerprint for name, fingerprint in found.items() if fingerprint is not None}
    unseen = {name: None for name, each in known.items() if each is None}  # models name it, by that alone
    server_state.put(conn, server_state.TRAINED, unseen | found)
    for name, fingerprint in known.items():
        if noted := fingerprint or found.get(name):
            model_records.note_base(conn, noted, name if len(known) > 1 else None)
    bases = server_state.get_bases(conn)
    served = {*trained} if bases is None else {facts.name for facts in bases.all}
    now = {fingerprint: name for name, fingerprint in trained.items()}
    renamed = {old: now[each] for old, each in known.items() if old not in served and each in now}
    server_state.rename_bases(conn, renamed)
    for fingerprint in {*trained.values()}:
        names = [name for name, each in trained.items() if each == fingerprint]
        model_records.name_base(conn, fingerprint, names)
    parked = 0
    for model in model_records.list_in_states(conn, ModelState.READY, ModelState.PARKED):
        if model.trained_on is None and model.base_model in found and not found[model.base_model]:
            continue
        if model.trained_on in trained.values():
            model_records.set_state(conn, model.key, ModelState.READY)
        else:
            _park(conn, model, _of_another(model, list(trained)))
            parked += 1
    return parked


def why_parked(conn: Connection, model: ModelRow, cause: str) -> str:
    """Return why a model is parked, and the checkpoint from which a new model could be created."""
    last = checkpoint_records.latest_for_model(conn, model.key, CheckpointKind.WEIGHTS)
    advice = "it has no checkpoint"
    if last is not None:
        advice = f"its last checkpoint is {last.path}"
    return f"model {model.model_id} is parked: {cause}; {advice}"


def _park(conn: Connection, model: ModelRow, cause: str) -> None:
    reason = why_parked(conn, model, cause)
    model_records.set_state(conn, model.key, ModelState.PARKED, reason)
    for future_id in queue.pending_of(conn, model.key):
        finish.fail(conn, future_id, Failure(reason, "server"))


def _of_another(model: ModelRow, names: Sequence[str]) -> str:
    """Return why a model of another base model cannot be trained here."""
    if model.base_model in names:
        return (
            f"the files of base model {model.base_model} are others than those that it was trained on; its "
            "training state is kept until they are served again"
        )
    return (
        f"it was trained on base model {model.base_model}, and this server trains {', '.join(names)}; its "
        "training state is kept until its base model is trained here again"
    )
