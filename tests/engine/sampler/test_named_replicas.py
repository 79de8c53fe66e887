"""Errors of failed requests name replicas as administrators see them, and no address of a server."""

import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_tinker.engine.outbox import failure_of
from skyrl_tinker.engine.sampler import fleet as fleet_module
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.errors import SamplerError
from tests.support.sampler_clients import opened_fleet, vllm_client, vllm_servers

URLS = ("http://127.0.0.1:80", "http://127.0.0.1:8000", "https://gpu.example/base")


def nobody() -> str:
    """A URL at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def fleet_of(*urls: str, router: Any = None) -> Fleet:
    servers = vllm_servers(urls, startup_s=1.0, hang_s=2.0, max_model_len=2)
    return opened_fleet(vllm_client("", urls), servers, router)


async def test_a_client_is_told_which_sampler_failed_and_the_log_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "NOTICED_WITHIN_S", 0.01)
    urls = (nobody(), nobody())
    fleet = fleet_of(*urls)
    for index, url in enumerate(urls):
        ask = partial(fleet.client.data.openai, "/v1/completions", {}, server=url)
        with pytest.raises(SamplerError) as failed:
            await fleet.with_retry(ask)
        told = f"POST sampler {index}/v1/completions failed: ClientConnectorError: Connection refused"
        assert failure_of(failed.value).message == told
        assert f"{url}/v1/completions" in caplog.text
    await fleet.client.close()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"update failed: {URLS[0]}: POST {URLS[0]}/update_weights: 500: no; to be replaced: {URLS[1]}",
            "update failed: sampler 0: POST sampler 0/update_weights: 500: no; to be replaced: sampler 1",
        ),
        (f"GET {URLS[2]}/health: 503", "GET sampler 2/base/health: 503"),
        ("POST http://[::1]:9/v1/completions: 503", "POST the router/v1/completions: 503"),
        (
            "http://10.0.0.4:5/5ec2e7/srv/v1 could not be pulled: timed out",
            "… could not be pulled: timed out",
        ),
        ("see https://docs.vllm.ai/en/latest (at 10:30)", "see https://docs.vllm.ai/en/latest (at 10:30)"),
    ],
)
async def test_urls_of_other_servers_are_left_out(text: str, told: str) -> None:
    router = SimpleNamespace(url="http://[::1]:9", enough=lambda urls: True)
    fleet = fleet_of(*URLS, router=router)
    fleet.condemn(URLS[0], "it stands still")
    assert fleet.without_urls(text) == told
