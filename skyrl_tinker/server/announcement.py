"""Lines that `serve` prints: while it starts its phases, then models, places, and how clients reach it."""

from collections.abc import Callable, Mapping

from sqlalchemy import make_url

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.server.addresses import client_url, is_loopback
from skyrl_tinker.server.base_models import catalog

READY = "skyrl-tinker ready: "
"""Beginning of the first line; the URL follows."""
_STARTING_API = "starting the API"


class StartPhases:
    """Phases of a start, each reported when it begins, and once that the API is slow to tell them."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._phase = ""
        self._is_slow = False

    def note(self, found: str | None) -> None:
        """Take the phase that the API tells; None: it did not answer in time."""
        if found is None and self._phase not in ("", _STARTING_API):
            if not self._is_slow:
                self._report("the API does not answer at present")
            self._is_slow = True
            return
        phase = _STARTING_API if found is None else found
        if phase != self._phase:
            self._report(phase)
        self._phase = phase


def announcement(settings: Settings, bases: Bases, failed: Mapping[str, str], *, keys: bool) -> str:
    """Return the lines. `failed`: why base models do not start, by name. `keys`: whether clients need one."""
    url = client_url(settings)
    models = [_model(settings, facts, failed.get(facts.name)) for facts in bases.all]
    facts_of_it = {
        "runs on": _devices(settings),
        "home": f"{settings.root}, logs in {Directories(settings).log_dir}",
        "API keys": _keys(settings, keys),
        **_places(settings),
        "dashboard": f"{url}/",
        "clients": f"export TINKER_BASE_URL={url} TINKER_API_KEY={'tml-…' if keys else 'tml-local'}",
        **_certificate(settings),
    }
    lines = [*(("model", model) for model in models), *facts_of_it.items()]
    return "\n".join([READY + url, *(f"  {name:<11} {value}" for name, value in lines)])


def _model(settings: Settings, facts: BaseModelFacts, failure: str | None) -> str:
    if failure is not None:
        return failure.removeprefix("base model ")
    return (
        f"{facts.name}, {facts.context_length} tokens of context, "
        + (_trained(settings.for_base(facts.name)) if facts.trainable else "sampling only")
        + ("" if facts.sampleable else ", training only")
        + ("" if settings.idle_s_of(facts.name) is None else ", starts on demand")
    )


def _trained(settings: Settings) -> str:
    rank = settings.max_lora_rank
    return f"adapters up to rank {rank}" if rank else "full parameters only"


def _places(settings: Settings) -> dict[str, str]:
    """Return the places that are not under home."""
    database = settings.database_url
    found = {
        "database": None if database is None else make_url(database).render_as_string(),
        "checkpoints": settings.checkpoints and str(settings.checkpoints),
        "snapshots": settings.snapshots and str(settings.snapshots),
        "engine": settings.engine_listen and f"{settings.engine_listen}, for API processes on other hosts",
    }
    return {name: str(value) for name, value in found.items() if value}


def _certificate(settings: Settings) -> dict[str, str]:
    cert = settings.tls_cert
    return {} if cert is None else {"": f"SSL_CERT_FILE={cert} where they do not know who signed it"}


def _devices(settings: Settings) -> str:
    of_bases = [settings, *catalog.further(settings)]
    samplers = sum(len(each.external_urls) or each.replicas for each in of_bases)
    placement = "in turns on the same devices" if settings.colocated else "side by side"
    return f"{settings.device} in {settings.trainer_dtype}: trainer ranks {settings.all_trainer_ranks}, " + (
        f"samplers {samplers}, {placement}" if samplers else "no samplers"
    )


def _keys(settings: Settings, keys: bool) -> str:
    if keys:
        return "required (skyrl-tinker keys)"
    reach = "is on this machine" if is_loopback(settings.host) else "reaches it"
    database = "" if settings.database_url is None else f" --database-url {make_url(settings.database_url)}"
    create = f"skyrl-tinker keys create --name NAME --home {settings.root}{database}"
    return f"none, so whoever {reach} may use it and sees all; the first one: {create}"
