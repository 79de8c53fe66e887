"""What a step is, and what the steps share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import tinker
from tinker import types

TOKENS = [7, 31, 12, 99, 45, 12, 80, 3, 64, 17]
TOLERANCE = 1e-3
PATIENCE_S = 180
Numbers = list[float]


class UnavailableError(Exception):
    """Step that this version has, but not in this environment."""


@dataclass(frozen=True)
class Step:
    name: str
    work: Callable[["Run"], None]
    since: str
    until: str
    broken: tuple[str, ...]

    def covers(self, number: str) -> bool:
        return order(self.since) <= order(number) < order(self.until) and number not in self.broken


def step(
    since: str = "0.0", until: str = "999", broken: tuple[str, ...] = ()
) -> Callable[[Callable[["Run"], None]], Step]:
    """Make a step of a function.

    `since`: the first version whose public classes can do it; `until`: the first that no longer can (both
    from the published wheels); `broken`: those whose own code fails at it.
    """
    return lambda work: Step(work.__name__, work, since, until, broken)


def steps_of(module: ModuleType) -> list[Step]:
    """In the order of the source."""
    return [value for value in vars(module).values() if isinstance(value, Step)]


def order(number: str) -> list[int]:
    return [int(part) for part in number.split(".")]


def done(pending: Any, patience_s: float = PATIENCE_S) -> Any:
    """Older versions answer at once where newer ones answer a future."""
    return pending.result(timeout=patience_s) if hasattr(pending, "result") else pending


class Run:
    """What the steps share, made when first asked for."""

    def __init__(self, url: str, model: str, number: str) -> None:
        self.url = url
        self.model = model
        self.version = number
        self.name = f"compat-{number}"

    @cached_property
    def service(self) -> Any:
        return tinker.ServiceClient(base_url=self.url)

    @cached_property
    def rest(self) -> Any:
        return self.service.create_rest_client()

    @cached_property
    def training(self) -> Any:
        metadata = {"made_by": self.name}
        return done(
            self.service.create_lora_training_client(
                base_model=self.model, rank=8, seed=1, user_metadata=metadata
            )
        )

    @cached_property
    def info(self) -> Any:
        return self.training.get_info()

    @property
    def run_id(self) -> str:
        return str(self.info.model_id)

    @property
    def session_id(self) -> str:
        return self.run_id.partition(":")[0]

    @cached_property
    def saved(self) -> str:
        return str(done(self.training.save_state(name=self.name)).path)

    @cached_property
    def saved_sampler(self) -> str:
        return str(done(self.training.save_weights_for_sampler(name=self.name)).path)

    @cached_property
    def sampler(self) -> Any:
        return done(self.training.save_weights_and_get_sampling_client())


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    """Return a datum that reads t[:-1] and predicts t[1:]; weights of 1 unless other inputs are given."""
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, **(inputs or {"weights": [1.0] * len(targets)})},
    )


def scored(training: Any) -> Numbers:
    output = done(training.forward([datum(TOKENS)], "cross_entropy"))
    return [float(value) for value in output.loss_fn_outputs[0]["logprobs"].tolist()]


def train(training: Any, learning_rate: float = 1e-2) -> float:
    """One step; the loss before it."""
    backward = training.forward_backward([datum(TOKENS)], "cross_entropy")
    update = training.optim_step(types.AdamParams(learning_rate=learning_rate))
    loss = float(done(backward).metrics["loss:sum"])
    done(update)
    return loss


def sample(sampler: Any, count: int = 1, options: dict[str, Any] | None = None, **params: Any) -> Any:
    wanted = types.SamplingParams(**{"max_tokens": 6, "seed": 3, "temperature": 1.0, **params})
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    return done(sampler.sample(prompt=prompt, num_samples=count, sampling_params=wanted, **(options or {})))


def close(found: Numbers, expected: Numbers) -> None:
    assert len(found) == len(expected), (len(found), len(expected))
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert worst <= TOLERANCE, f"{worst} apart: {found} and {expected}"
