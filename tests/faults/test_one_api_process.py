"""The only API process of a server is replaced while clients work."""

import pytest

from tests.faults.test_api_processes import apis, replace, work_during
from tests.support.serve import HEAL_S, Serve
from tests.support.waiting import wait_until


def test_a_restart_of_the_only_process_loses_no_request(
    server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    assert wait_until(server.ready, HEAL_S)
    (before,) = apis(server)
    log = server.home / "logs" / "api.log"
    said = len(log.read_text())
    work_during(server, lambda: replace(server))
    (now,) = apis(server)
    assert now != before
    assert "Traceback" not in log.read_text()[said:]
