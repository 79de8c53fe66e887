"""The words by which vLLM gives up one request: its status, type and code are those of all its failures."""

import json
import subprocess
import sys

from skyrl_tinker.errors import RequestGivenUpError, SamplerError
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM

ANSWER = """
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError

try:
    GenerateBaseServing._raise_if_error(None, "error", "a")
except GenerationError as error:
    print(create_error_response(error).model_dump_json())
"""


def test_they_are_those_of_vllm() -> None:
    told = subprocess.run([sys.executable, "-c", ANSWER], check=True, capture_output=True, text=True).stdout
    error = json.loads(told.splitlines()[-1])["error"]
    assert isinstance(VLLM.refusal(error["code"], error["message"]), RequestGivenUpError)
    other = VLLM.refusal(error["code"], "EngineCore encountered an issue.")
    assert type(other) is SamplerError
