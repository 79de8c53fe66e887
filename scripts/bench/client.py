"""What the benchmarks that use the SDK have in common: their options and their data."""

import argparse
import os
import random

from serving import options_of
from tinker import types


def options(doc: str | None) -> argparse.ArgumentParser:
    """--base-url and --base-model; a server on the loopback takes any key."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    parser = options_of(doc)
    parser.add_argument("--base-url", help="of a running server; default: one is started")
    parser.add_argument("--base-model", default="tiny")
    return parser


def random_tokens(count: int) -> list[int]:
    return [random.randrange(3, 300) for _ in range(count)]


def random_prompt(count: int) -> types.ModelInput:
    return types.ModelInput.from_ints(random_tokens(count))


def random_datum(count: int) -> types.Datum:
    """For cross_entropy, all `count` targets with weight 1."""
    tokens = random_tokens(count + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
            "weights": types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
        },
    )
