"""One running server for the whole session: start-up is what costs."""

from collections.abc import Iterator

import pytest
import tinker

from tests.e2e.support.client import Client
from tests.support.collector import Collector, collecting
from tests.support.serve import Serve, serving

KEY = "tml-local"


@pytest.fixture(autouse=True, scope="package")
def api_key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        yield


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Serve]:
    settings = f'otlp_endpoint = "{collector.url}"\n[vllm_args]\ndisable-log-stats = false\n'
    with serving(tmp_path_factory.mktemp("shared") / "home", settings=settings) as shared:
        yield shared


@pytest.fixture(scope="session")
def service(server: Serve) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:  # `api_key` is set after it
        yield client


@pytest.fixture(scope="session")
def client(server: Serve, service: tinker.ServiceClient) -> Client:
    return Client(server.url, service)


@pytest.fixture(scope="session")
def model_directory(client: Client) -> str:
    """The base model's directory, for plain Hugging Face references."""
    return client.new_lora().get_info().model_data.tokenizer_id
