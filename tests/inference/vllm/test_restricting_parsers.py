"""Tool parsers with which vLLM restricts what is sampled, without being asked."""

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tinker import config
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.vllm.vllm_models import RESTRICTING_PARSERS
from skyrl_tinker.server.base_models.base_model import resolve
from tests.support.tiny_models import write_tiny

LIST = """
from vllm.tool_parsers import ToolParserManager as known
parsers = {name: known.get_tool_parser(name) for name in known.list_registered()}
print(*(name for name, parser in parsers.items() if parser.default_tool_strict_level))
"""


def test_they_are_those_of_vllm() -> None:
    listed = subprocess.run([sys.executable, "-c", LIST], check=True, capture_output=True, text=True)
    assert sorted(listed.stdout.splitlines()[-1].split()) == sorted(RESTRICTING_PARSERS)


def test_they_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    for name in RESTRICTING_PARSERS:
        with pytest.raises(StartupError, match=f"tool_parser: found {name}, expected another"):
            resolve(config.load(base_model=str(tmp_path), tool_parser=name))
    resolve(config.load(base_model=str(tmp_path), tool_parser="hermes"))
