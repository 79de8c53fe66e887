"""Facts of the installed vLLM that are known here by name: parsers that restrict, words of a failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.errors import RequestGivenUpError, SamplerError, StartupError
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from skyrl_tinker.inference.vllm.vllm_models import RESTRICTING_PARSERS
from skyrl_tinker.server.base_models.base_model import resolve
from tests.support.tiny_models import write_tiny

ASKED = """
import json
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.tool_parsers import ToolParserManager as known

parsers = {name: known.get_tool_parser(name) for name in known.list_registered()}
restricting = [name for name, parser in parsers.items() if parser.default_tool_strict_level]
try:
    GenerateBaseServing._raise_if_error(None, "error", "a")
except GenerationError as error:
    given_up = json.loads(create_error_response(error).model_dump_json())["error"]
print(json.dumps({"restricting": restricting, "given_up": given_up}))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Answers of one process: it imports vLLM, which takes seconds."""
    done = subprocess.run([sys.executable, "-c", ASKED], check=True, capture_output=True, text=True)
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_parsers_that_restrict_what_is_sampled_without_being_asked(told: dict[str, Any]) -> None:
    assert sorted(told["restricting"]) == sorted(RESTRICTING_PARSERS)


def test_they_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    for name in RESTRICTING_PARSERS:
        with pytest.raises(StartupError, match=f"tool_parser: found {name}, expected another"):
            resolve(config.load(base_model=str(tmp_path), tool_parser=name))
    resolve(config.load(base_model=str(tmp_path), tool_parser="hermes"))


def test_only_words_tell_that_one_request_was_given_up(told: dict[str, Any]) -> None:
    """Status, type and code are those of all its failures."""
    error = told["given_up"]
    assert isinstance(VLLM.refusal(error["code"], error["message"]), RequestGivenUpError)
    other = VLLM.refusal(error["code"], "EngineCore encountered an issue.")
    assert type(other) is SamplerError
