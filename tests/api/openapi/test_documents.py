"""The document of the API: complete enough to be read by people, and tried, and to make clients from."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from skyrl_tinker.api.openapi.documents import TAGS
from skyrl_tinker.api.openapi.examples import EXAMPLES
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.json_passes import ForwardBackwardJson, ForwardJson
from skyrl_tinker.protocol.schemas.base import Message, parse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.training import validate_forward_backward
from tests.api.support.world import BASE, World

Operation = dict[str, Any]

WITHOUT_A_BODY = {
    ("post", "/api/v1/auth/token"),
    ("post", "/api/v1/auth/apikey"),
    ("post", "/api/v1/external_weights_upload_start"),
    ("post", "/api/v1/external_weights_upload_finish"),
    ("post", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"),
}


def operations(world: World) -> Iterator[tuple[str, str, Operation]]:
    for path, methods in world.app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


async def test_every_route_is_in_the_document_and_has_a_summary_and_a_known_tag(world: World) -> None:
    documented = {(method.upper(), path) for method, path, _ in operations(world)}
    routes = {
        (method, route.path_format)
        for route in world.app.routes
        if isinstance(route, APIRoute) and route.path not in ("/", "/docs", "/dashboard")
        for method in route.methods
    }
    assert documented == routes
    for method, path, operation in operations(world):
        assert operation["summary"], (method, path)
        assert set(operation["tags"]) <= {tag["name"] for tag in TAGS}, (method, path)


async def test_every_answer_has_a_schema(world: World) -> None:
    for method, path, operation in operations(world):
        answer = operation["responses"].get("200", operation["responses"].get("302"))
        assert answer is not None, (method, path)
        for media_type, content in answer.get("content", {}).items():
            assert content["schema"], (method, path, media_type)
        assert "content" in answer or "302" in operation["responses"], (method, path)
        refusal = operation["responses"]["4XX"]
        assert refusal["content"]["application/json"]["schema"], (method, path)


async def test_every_body_has_a_schema_and_examples(world: World) -> None:
    for method, path, operation in operations(world):
        body = operation.get("requestBody")
        expected = method in ("post", "put") and (method, path) not in WITHOUT_A_BODY
        assert (body is not None) == expected, (method, path)
        if body is not None:
            content = body["content"]["application/json"]
            assert content["schema"]["type" if "anyOf" not in content["schema"] else "anyOf"]
            assert content["examples"], (method, path)


@pytest.mark.parametrize("model", EXAMPLES, ids=lambda model: model.__name__)
def test_every_example_is_a_message(model: type[Message]) -> None:
    parsed = parse(model, EXAMPLES[model])
    assert set(EXAMPLES[model]) <= set(parsed.model_dump()), "a field that the message does not have"
    if isinstance(parsed, CreateCustomLossRequest):
        check_custom_loss(parsed)


@pytest.mark.parametrize("model", [ForwardBackwardJson, ForwardJson])
def test_the_examples_of_passes_pass(model: type[Message]) -> None:
    limits = Limits("tiny", vocab_size=151936, context_length=4096, max_datums=1, max_lora_rank=64)
    validate_forward_backward(pass_requests.decode_forward_backward_json(EXAMPLES[model]), limits)


async def test_an_example_works_as_it_stands_but_for_its_ids(world: World) -> None:
    for method, path, operation in operations(world):
        if method != "post" or "requestBody" not in operation or "/admin/" in path:  # it has no keys
            continue
        for shown in operation["requestBody"]["content"]["application/json"]["examples"].values():
            body = json.dumps(shown["value"]).replace('"tiny"', f'"{BASE}"')
            answer = await world.http.post(f"http://api{path}", content=body)
            # the ids in them are nobody's; there is no engine to relay to
            assert answer.status_code in (200, 404, 410, 503), f"{path}: {answer.status_code} {answer.text}"


async def test_the_docs_need_nothing_from_elsewhere(world: World) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://api") as http:
        page = (await http.get("/docs")).text
        assert "https://" not in page
        for url in (
            "/docs/assets/swagger-ui-bundle.js",
            "/docs/assets/swagger-ui.css",
            "/docs/assets/favicon.png",
        ):
            assert url.removeprefix("/") in page
            assert len((await http.get(url)).raise_for_status().content) > 500
        document = (await http.get("/api/v1/openapi.json")).raise_for_status().json()
        assert "api/v1/openapi.json" in (await http.get("/dashboard/docs.js")).raise_for_status().text
    assert "X-API-Key" in document["info"]["description"]
    assert document["components"]["securitySchemes"]["key"]["name"] == "X-API-Key"


async def test_a_path_that_is_no_route_says_where_the_routes_are(world: World) -> None:
    """Ask as a client does whose TINKER_BASE_URL ends in /api/v1."""
    answer = await world.http.get("api/v1/get_server_capabilities")
    assert answer.status_code == 404
    assert "no route GET /api/v1/api/v1/get_server_capabilities" in answer.json()["detail"]
    assert "/docs" in answer.json()["detail"]
    assert "OpenAI clients with /oai/api/v1" in answer.json()["detail"]
