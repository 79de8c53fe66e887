"""Client of a running server: its facts, asked over HTTP, and changes of them."""

import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from skyrl_tinker import __version__
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.errors import StartupError
from skyrl_tinker.protocol.schemas.console import RunColumn
from skyrl_tinker.server.addresses import is_http, local_url
from skyrl_tinker.system.process_lock import holder
from skyrl_tinker.system.processes import listens

PATIENCE_S = 10.0
MOST_DAYS = 14
"""Days of one answer about usage."""
MOST_LISTED = 1000
GREATEST_FIRST = "steps", "reward", "last_request"
"""Columns of runs by which these are sorted downwards, unless in reverse."""
Facts = Mapping[str, Any]
_EXPIRED, _OTHER_HOST = 10, (62, 64)
"""OpenSSL's codes of refused certificates; of those for others by their name, and by their address."""
_KEY = re.compile(r"[!-~]*")
"""Characters that a header may have."""


class ServerAwayError(StartupError):
    """No server answers."""


class NotThereError(StartupError):
    """The server does not have it."""


class RunningServer:
    """Server that is known to be the right one: it is sent the key of TINKER_API_KEY."""

    def __init__(self, url: str, trusted: ssl.SSLContext, certificate: Path | None = None) -> None:
        """Use `at` or `of_home`. StartupError for a key that cannot be sent.

        `certificate`: the one that is trusted alone.
        """
        self.url = url.rstrip("/")
        self._certificate = certificate
        key = os.environ.get("TINKER_API_KEY", "")
        if not _KEY.fullmatch(key):
            raise StartupError("TINKER_API_KEY: found white space or a letter beyond ASCII, expected a key")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"X-API-Key": key} if key else {},
            timeout=PATIENCE_S,
            trust_env=False,  # no proxies, no .netrc
            verify=trusted,
        )

    def now(self) -> Facts:
        """Return the dashboard's view of this moment."""
        return self._ask("GET", "/api/v1/console/now")

    def usage(self, hours: int) -> Facts:
        """Return the usage of the last hours, up to now."""
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        return self._usage_between(end - timedelta(hours=hours), end)

    def usage_of_days(self, days: int) -> Iterator[Facts]:
        """Yield the usage of the last days, up to the end of today in UTC, in parts."""
        end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        for left in range(days, 0, -MOST_DAYS):
            first = end - timedelta(days=left)
            yield self._usage_between(first, min(end, first + timedelta(days=MOST_DAYS)))

    def _usage_between(self, first: datetime, end: datetime) -> Facts:
        params = {"starting_on": first.isoformat(), "ending_before": end.isoformat()}
        return self._ask("GET", "/api/v1/billing/usage/events", params=params)

    def checkpoints(self, run: str | None, age_s: float, owner: str | None = None) -> list[Facts]:
        """Return checkpoints of at least this age, of a run and an owner or of all, the oldest first."""
        newest = datetime.now(UTC) - timedelta(seconds=age_s)
        found = self._all_checkpoints() if run is None else self._checkpoints_of(run)
        old = [each for each in found if datetime.fromisoformat(each["time"]) <= newest]
        chosen = [each for each in old if owner is None or each["owner"] == owner]
        return sorted(chosen, key=lambda each: str(each["time"]))

    def _checkpoints_of(self, run: str) -> Iterator[Facts]:
        yield from self._ask("GET", f"/api/v1/training_runs/{quote(run, safe='')}/checkpoints")["checkpoints"]

    def _all_checkpoints(self) -> Iterator[Facts]:
        total, offset = 1, 0
        while offset < total:
            page = self._ask("GET", "/api/v1/checkpoints", params={"limit": MOST_LISTED, "offset": offset})
            total, offset = page["cursor"]["total_count"], offset + MOST_LISTED
            yield from page["checkpoints"]

    def delete_checkpoint(self, path: TinkerPath) -> bool:
        """Delete a checkpoint; False if there is none."""
        where = f"{quote(path.model_id, safe='')}/checkpoints/{path.checkpoint_id}"
        try:
            self._ask("DELETE", f"/api/v1/training_runs/{where}")
        except NotThereError:
            return False
        return True

    def runs(
        self, most: int, words: str = "", sort: RunColumn = "last_request", *, reverse: bool = False
    ) -> Facts:
        """Return the first runs, of those that have all words: by default those with the latest requests."""
        order = "descending" if (sort in GREATEST_FIRST) != reverse else "ascending"
        params = {"limit": most, "sort": sort, "order": order} | ({"search": words} if words else {})
        return self._ask("GET", "/api/v1/console/runs", params=params)

    def has_run(self, run: str) -> bool:
        """Return whether there is a run of this id."""
        try:
            self._ask("GET", f"/api/v1/console/runs/{quote(run, safe='')}")
        except NotThereError:
            return False
        return True

    def newest_run(self) -> str:
        """Return the run with the latest request. Raises StartupError if there is none."""
        if not (runs := self.runs(1)["runs"]):
            raise StartupError(f"{self.url} has no runs: start the script first, or give --run")
        return str(runs[0]["run_id"])

    def report(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Report numbers of a step of a run. Raises ServerAwayError, or StartupError if they are refused."""
        path = f"/api/v1/console/runs/{quote(run, safe='')}/metrics"
        self._ask("POST", path, json={"step": step, "values": dict(values)})

    def change_base(self, base_model: str, action: str) -> Facts:
        """Start or stop a base model on demand. Raises StartupError if it is refused."""
        body = {"base_model": base_model, "action": action}
        return self._ask("POST", "/api/v1/console/admin/bases", json=body)

    def end(self, session: str) -> None:
        """Finish a session; its models leave the trainer."""
        self._ask("POST", f"/api/v1/sessions/{quote(session, safe='')}/finish", json={})

    def _ask(self, method: str, path: str, **content: Any) -> Facts:
        try:
            answer = self._http.request(method, path, **content)
        except httpx.RequestError as error:
            if (refusal := _refusal_of_certificate(error)) is not None:
                raise StartupError(f"{self.url}: {self._untrusted(refusal)}") from error
            raise ServerAwayError(f"no server answers at {self.url}: {error}") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise StartupError(f"{self.url} needs an API key that it knows: set TINKER_API_KEY")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotThereError(f"{self.url}: {_detail(answer)}")
        if not answer.is_success:
            raise StartupError(f"{self.url}: {_detail(answer)}")
        try:
            found: Facts = answer.json()
        except ValueError as error:
            raise StartupError(f"{self.url}: {_other_form(answer.text[:200])}") from error
        return found

    def _untrusted(self, refusal: ssl.SSLCertVerificationError) -> str:
        """Return why the server's certificate is refused, and the change that helps."""
        given = os.environ.get("SSL_CERT_FILE") or "none"
        change = (
            f"SSL_CERT_FILE: found {given}, expected a PEM file with the server's certificate, or with that "
            "of the authority which signed it"
        )
        if self._certificate is not None:
            change = f"expected {self._certificate}; after its renewal send `serve` the signal SIGUSR2"
        elif refusal.verify_code in _OTHER_HOST:
            change = "--url, or TINKER_BASE_URL: expected a name or an address that the certificate is for"
        elif refusal.verify_code == _EXPIRED:
            change = "the server needs a new one (its --tls-cert)"
        return f"certificate verify failed: {refusal.verify_message}; {change}"


def _refusal_of_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the refusal that an error stems from, if it does."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def at(url: str) -> RunningServer:
    """Return the server of a URL that the user names; authorities of SSL_CERT_FILE are trusted.

    Raises StartupError for a text that is no URL, and for authorities that cannot be read.
    """
    try:
        valid = is_http(str(httpx.URL(url)))
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise StartupError(f"--url, or TINKER_BASE_URL: found {url!r}, expected http://host:port")
    try:
        trusted = httpx.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        raise StartupError(f"SSL_CERT_FILE or SSL_CERT_DIR: {error}") from error
    return RunningServer(url, trusted)


@contextmanager
def understood() -> Iterator[None]:
    """Context in which an answer is used. Raises StartupError for one of another form than ours."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"the server: {_other_form(repr(error))}") from error


def of_home(settings: Settings) -> RunningServer:
    """Return the server, of any version, that runs on a home.

    Raises StartupError unless that process listens there.
    """
    directories = Directories(settings)
    file = directories.settings_file
    try:
        found = json.loads(file.read_text())
        noted = Settings.model_validate({name: found[name] for name in ("host", "port", "tls_cert")})
    except FileNotFoundError as error:
        raise StartupError(
            f"no server has run with --home {settings.home}: give --url, TINKER_BASE_URL or another --home"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{file} is damaged: give --url, or start the server again") from error
    url = local_url(noted)
    pid = holder(directories.server_lock)
    if pid is None or not listens(pid, noted.port):
        raise StartupError(
            f"no server answers at {url}: that of --home {settings.home} does not run, or in a container or "
            "on another host: give its --url"
        )
    certificate = noted.tls_cert
    trusted = httpx.create_ssl_context() if certificate is None else _only(certificate)
    return RunningServer(url, trusted, certificate)


def _only(certificate: Path) -> ssl.SSLContext:
    """Trust one certificate, under any name: it has that for clients, not that of this machine's loopback.

    Raises StartupError for a damaged one.
    """
    _, begin, rest = certificate.read_text().partition("-----BEGIN CERTIFICATE-----")
    first, end, _ = rest.partition("-----END CERTIFICATE-----")  # the others signed it
    try:
        context = ssl.create_default_context(cadata=begin + first + end)
    except ssl.SSLError as error:
        raise StartupError(f"{certificate} is damaged: {error}") from error
    context.check_hostname = False
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _detail(answer: httpx.Response) -> str:
    """Return why a request was refused."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):  # a proxy's answer
        return f"answered {answer.status_code}: {answer.text[:200]}"


def _other_form(found: str) -> str:
    return f"answered in another form than skyrl-tinker {__version__} ({found}): is it one, of this version?"
