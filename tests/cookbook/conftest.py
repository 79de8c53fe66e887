"""One server and one taught model for all of the cookbook's loops."""

from collections.abc import Iterator

import pytest
import tinker
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.cookbook.support.kitchen import RENDERER, Kitchen, Run
from tests.support.serve import serving


@pytest.fixture(scope="package")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    made = Kitchen(tmp_path_factory.mktemp("kitchen"))
    with serving(made.directory / "home", "--config", str(made.write_config())) as server:
        made.url = server.url
        yield made


@pytest.fixture(scope="package")
def service(kitchen: Kitchen) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=kitchen.url, api_key="tml-local") as client:
        yield client


@pytest.fixture(scope="package")
def renderer(kitchen: Kitchen) -> Renderer:
    return get_renderer(RENDERER, get_tokenizer(str(kitchen.model_directory)))


@pytest.fixture(scope="package")
def taught(kitchen: Kitchen) -> Run:
    """sl_loop teaches the form of an answer, without which no group of samples ever has different rewards."""
    settings = ("batch_size=8", "learning_rate=6e-3", "max_length=512", "save_every=5")
    return kitchen.cook("sl_loop", "taught", *settings)
