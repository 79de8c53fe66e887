"""Process that fetches base models' weights from the hub.

For the first one it says how far it is in place of the engine, which starts after that. A process, because
a thread cannot be stopped in the middle of a file.
"""

import logging
import sys
import time
from collections.abc import Collection
from pathlib import Path

from skyrl_tinker import config
from skyrl_tinker.domain.units import GB
from skyrl_tinker.errors import StartupError
from skyrl_tinker.redaction import log_to_stderr
from skyrl_tinker.server.base_models import hub
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import write_once

_REPORT_S = 5.0

_log = logging.getLogger(__name__)


def run(settings_file: Path, hub_names: Collection[str]) -> int:
    """Fetch what can be fetched. Returns the exit code; the log's last line says why it is 1."""
    log_to_stderr()
    settings = config.read_back(settings_file)
    bases = write_once(settings.store_url, server_state.get_bases)
    assert bases is not None, "`serve` writes them first"
    errors: list[StartupError] = []
    for facts in bases.all:
        if facts.hub_name is not None and facts.hub_name in hub_names:
            report = _Report(settings.store_url if facts == bases.first else None, facts.hub_name)
            try:
                hub.fetch_weights(facts.hub_name, Path(facts.directory), report)
            except StartupError as error:
                errors.append(error)
    for each in errors:
        _log.error("ended: %s", each)
    return 1 if errors else 0


class _Report:
    """Writes to the log, and to the store if there is one, how far it is with one model."""

    def __init__(self, store_url: str | None, name: str) -> None:
        self._store_url = store_url
        self._name = name
        self._next = 0.0

    def __call__(self, done: int, size: int) -> None:
        now = time.time()
        if now < self._next:
            return
        self._next = now + _REPORT_S
        detail = f"downloading {self._name}: {done / GB:.2f} of {size / GB:.2f} GB"
        _log.info("%s", detail)
        if self._store_url is not None:
            state = {"state": "starting", "detail": detail}
            write_once(self._store_url, lambda conn: server_state.put(conn, "engine", state))


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
