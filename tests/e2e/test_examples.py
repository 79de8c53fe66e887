"""The scripts in examples/, run as a reader runs them. tests/e2e/test_demo.py runs rl_loop.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.support.client import Client

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(client: Client, example: str) -> str:
    environment = os.environ | {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": "tml-local"}
    command = [sys.executable, "-W", "ignore", "-W", "error::FutureWarning", str(EXAMPLES / example)]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def numbers(text: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name} ([0-9.e+-]+)", text)]


def test_sft_learns_its_answers(client: Client) -> None:
    printed = output(client, "sft.py")
    losses = numbers(printed, "loss per token")
    assert losses[-1] < losses[0] / 10
    assert "Capital of France? Paris\n" in printed
    assert "Capital of Peru? Lima\n" in printed


def test_openai_client_streams_text_and_samples_saved_weights(client: Client) -> None:
    printed = output(client, "openai_client.py")
    assert re.search(r"^models:.* tiny", printed)
    chat = re.search(r"^chat: (.+?)^completion of tinker://", printed, re.DOTALL | re.MULTILINE)
    assert chat is not None
    assert len(chat[1]) > 1  # beside the end of the line: an untrained model may say empty lines


def test_custom_loss_falls_and_its_metric_rises(client: Client) -> None:
    printed = output(client, "custom_loss.py")
    losses, probabilities = numbers(printed, "loss"), numbers(printed, "probability")
    assert losses[-1] < losses[0] / 2
    assert probabilities[-1] > 2 * probabilities[0]


def test_a_resumed_run_repeats_the_losses_exactly(client: Client) -> None:
    printed = output(client, "resume.py")
    continued, resumed = numbers(printed, "continued"), numbers(printed, "resumed")
    assert len(continued) == 5
    assert continued == resumed
    assert continued[-1] < continued[0]
