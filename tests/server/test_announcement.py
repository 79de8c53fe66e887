"""The first thing that a user reads: how to reach the server, and where it keeps what it has."""

from dataclasses import replace
from pathlib import Path

from skyrl_tinker import config
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.server.announcement import StartPhases, announcement
from tests.api.support.world import FACTS
from tests.support.certificates import write_certificate


def test_it_has_a_line_for_each_base_model(tmp_path: Path) -> None:
    bases = {"teacher": {"start": "on_demand"}}
    settings = config.load(home=tmp_path, max_lora_rank=16, bases=bases)
    teacher = replace(FACTS, names=("teacher",), trainable=False)
    lines = announcement(settings, Bases((FACTS, teacher)), {}, keys=False).splitlines()
    assert (
        lines[1]
        == f"  model       {FACTS.name}, {FACTS.context_length} tokens of context, adapters up to rank 16"
    )
    about = f"{FACTS.context_length} tokens of context, sampling only, starts on demand"
    assert lines[2] == f"  model       teacher, {about}"
    assert "samplers 2, side by side" in lines[3]


def test_it_tells_clients_the_certificate_that_they_may_not_know(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    settings = config.load(home=tmp_path, tls_cert=cert, tls_key=key)
    *_, clients, certificate = announcement(settings, Bases((FACTS,)), {}, keys=True).splitlines()
    assert clients.startswith("  clients     export TINKER_BASE_URL=https://")
    assert certificate == f"{'':14}SSL_CERT_FILE={cert} where they do not know who signed it"
    plain = announcement(config.load(home=tmp_path), Bases((FACTS,)), {}, keys=True)
    assert "SSL_CERT_FILE" not in plain


def test_it_tells_that_a_base_model_is_only_trained(tmp_path: Path) -> None:
    settings = config.load(home=tmp_path, replicas=0)
    lines = announcement(settings, Bases((replace(FACTS, sampleable=False),)), {}, keys=False).splitlines()
    assert lines[1].endswith("tokens of context, adapters up to rank 64, training only")
    assert lines[2].endswith("trainer ranks 1, no samplers")


def test_it_tells_why_a_base_model_does_not_start(tmp_path: Path) -> None:
    bases = Bases((FACTS, replace(FACTS, names=("bad",))))
    failed = {"bad": "base model bad does not start: 'm' is not a whole safetensors file"}
    lines = announcement(config.load(home=tmp_path), bases, failed, keys=False).splitlines()
    assert lines[1].startswith(f"  model       {FACTS.name}, {FACTS.context_length} tokens of context")
    assert lines[2] == "  model       bad does not start: 'm' is not a whole safetensors file"


def test_phases_of_a_start_are_told_once_each_by_an_api_that_is_slow() -> None:
    told: list[str] = []
    phases = StartPhases(told.append)
    looks = [None, None, "waiting for a, b", None, "waiting for a, b", None, "waiting for b", None, None]
    for found in looks:
        phases.note(found)
    slow = "the API does not answer at present"
    assert told == ["starting the API", "waiting for a, b", slow, "waiting for b"]
    phases.note("waiting for a, b")
    assert told[-1] == "waiting for a, b", "a began anew"


def test_it_names_the_places_that_are_not_under_home_without_secrets(tmp_path: Path) -> None:
    alone = announcement(config.load(home=tmp_path), Bases((FACTS,)), {}, keys=False)
    assert not any(word in alone for word in ("database  ", "checkpoints  ", "snapshots  ", "engine  "))
    cluster = config.load(
        home=tmp_path,
        database_url="postgresql+psycopg://u:hidden@db/journal",
        checkpoints="s3://bucket/a",
        snapshots="/shared/b",
        engine_listen="10.0.0.1:8100",
    )
    lines = announcement(cluster, Bases((FACTS,)), {}, keys=True).splitlines()
    assert "  database    postgresql+psycopg://u:***@db/journal" in lines
    assert "  checkpoints s3://bucket/a" in lines
    assert "  snapshots   /shared/b" in lines
    assert "  engine      10.0.0.1:8100, for API processes on other hosts" in lines
