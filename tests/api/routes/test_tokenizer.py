"""The tokenizer of the base model, for clients on other machines."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from skyrl_tinker.api.routes.tokenizer import TOKENIZER_FILES, tokenizer_tar
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.values import BaseModelFacts
from tests.api.support.world import BASE, FACTS, World, running


def facts_of(model: Path) -> BaseModelFacts:
    return replace(FACTS, directory=str(model))


async def test_a_client_elsewhere_unpacks_it_and_loads_the_same(
    settings: Settings, served: Path, tmp_path: Path
) -> None:
    async with running(settings, facts_of(served)) as world:
        answer = await world.http.get("tokenizer")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert set(tar.getnames()) <= set(TOKENIZER_FILES)
        assert not any(name.endswith(".safetensors") for name in tar.getnames())
        tar.extractall(tmp_path / "copy", filter="data")
    ours, theirs = (AutoTokenizer.from_pretrained(directory) for directory in (served, tmp_path / "copy"))
    chat = [{"role": "user", "content": "Wie geht's?"}]
    assert ours.encode("Hello 42") == theirs.encode("Hello 42")
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)


async def test_a_model_without_one_is_404(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, facts_of(tmp_path)) as world:
        answer = await world.http.get("tokenizer")
    assert (answer.status_code, answer.json()) == (
        404,
        {"detail": "not found: the base model has no tokenizer"},
    )


async def test_each_base_model_has_its_own(settings: Settings, served: Path, tmp_path: Path) -> None:
    named = replace(facts_of(served), names=("org/other",))
    async with running(settings, facts_of(tmp_path), named) as world:
        assert (await world.http.get("tokenizer")).status_code == 404
        answer = await world.http.get("tokenizer", params={"base_model": "org/other"})
        assert answer.content == tokenizer_tar(served)


async def test_the_tokenizer_s_id_is_the_hub_s_name_where_there_is_one(settings: Settings) -> None:
    for facts, expected in ((FACTS, "/models/tiny"), (replace(FACTS, hub_name="org/tiny"), "org/tiny")):
        async with running(settings, facts) as world:
            data = (await world.ok("get_info", {"model_id": await world.model()}))["model_data"]
            assert data["tokenizer_id"] == expected


@pytest.mark.parametrize(
    ("address", "hub_name", "told"),
    [("127.0.0.1", None, False), ("10.0.0.7", "org/tiny", False), ("10.0.0.7", None, True)],
)
async def test_only_who_cannot_read_the_directory_is_told_where_it_is(
    settings: Settings, address: str, hub_name: str | None, told: bool
) -> None:
    async with running(settings, replace(FACTS, hub_name=hub_name)) as world:
        warning = await _warning(world, address)
    assert ("GET /api/v1/tokenizer" in (warning or "")) == told


async def test_the_base_models_whose_directories_hold_it_are_named(settings: Settings) -> None:
    hub = replace(FACTS, names=("org/hub",), hub_name="org/hub")
    async with running(settings, FACTS, hub) as world:
        warning = await _warning(world, "10.0.0.7") or ""
    assert f"the tokenizer of {BASE} is not from" in warning
    assert "GET /api/v1/tokenizer?base_model=… of this server" in warning


async def _warning(world: World, address: str) -> str | None:
    transport = httpx.ASGITransport(world.app, client=(address, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://api/api/v1") as http:
        warning: str | None = (await http.post("create_session", json={})).json()["warning_message"]
        return warning


def test_all_answers_share_one_tar(served: Path) -> None:
    assert tokenizer_tar(served) is tokenizer_tar(served)
