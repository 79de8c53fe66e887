"""Reinforcement learning on the tinker SDK, in one file to copy: a policy learns to say the next letter.

The right answer to "next:C" is "d". A short warm-up on right answers makes the untrained model right in one
answer of eight. From there it learns from rewards alone: sample a group of answers to every prompt, reward
each with 1 or 0, and train with importance_sampling on how much better an answer was than its group.

It needs `tinker`, `tqdm`, `matplotlib`, and TINKER_BASE_URL and TINKER_API_KEY in the environment.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tinker
from tinker import types
from tqdm import tqdm

PROMPTS = {f"next:{letter}": following for letter, following in zip("ABCDEFGHIJ", "bcdefghija", strict=True)}
GROUP_SIZE = 32  # answers per prompt and step
WARM_UP_UNTIL, WARM_UP_MOST, WARM_UP_REPEATS = 0.12, 60, 4  # probability of the right answer; steps; copies
WARM_UP_LEARNING_RATE, LEARNING_RATE = 5e-3, 4e-3
FULL_RATE_STEPS = 40  # then the rate falls as 1 / step: a policy that answers rightly is left alone


@dataclass(frozen=True)
class Options:
    out: Path
    seed: int = 0  # of the adapter and the samples
    unseeded: bool = False  # samples of an engine that takes no seeds
    steps: int = 40
    base_model: str | None = None  # the one that is served
    rank: int = 32


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl."""

    step: int  # optimizer steps that the weights which sampled had taken: by it the dashboard places the rest
    reward: float  # mean over all answers of the step
    loss: float  # sum over all tokens of the step
    tokens_per_s: float  # sampled and trained
    seconds: float


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]  # under the policy that gave it
    reward: float
    advantage: float


def main(options: Options) -> bool:
    """Train; write metrics.jsonl and reward.png; return whether the reward rose."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tinker.ServiceClient(
        display_name="rl_loop: the next letter"
    ) as service:  # its models leave the server at the end
        served = tinker.RestClient().get_server_capabilities().result().supported_models
        model = options.base_model or served[0].model_name
        trainer = service.create_lora_training_client(model, rank=options.rank, seed=options.seed).result()
        task = Task(trainer.get_tokenizer())
        taken = warm_up(trainer, task)
        steps = reinforce(trainer, task, options, taken)
    return report(steps, options.out)


class Task:
    """The prompts and their right answers as tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.answers = {
            tuple(tokenizer.encode(prompt)): [*tokenizer.encode(answer), tokenizer.eos_token_id]
            for prompt, answer in PROMPTS.items()
        }

    def reward(self, prompt: tuple[int, ...], answer: Sequence[int]) -> float:
        return float(list(answer) == self.answers[prompt])


def warm_up(trainer: tinker.TrainingClient, task: Task) -> int:
    """Take supervised steps until the right answers have a probability of WARM_UP_UNTIL; return how many."""
    data = [
        datum(prompt, answer, weights=[1.0] * len(answer)) for prompt, answer in task.answers.items()
    ] * WARM_UP_REPEATS
    bar = tqdm(range(WARM_UP_MOST), desc="warm-up", leave=False)
    taken = 0
    for _ in bar:
        passed = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=WARM_UP_LEARNING_RATE))
        result = passed.result()
        stepped.result()
        taken += 1
        right = probability(result, answer_length=2)
        bar.set_postfix_str(f"probability of the right answer {right:.2f}")
        if right >= WARM_UP_UNTIL:
            break
    bar.close()
    return taken


def probability(result: types.ForwardBackwardOutput, answer_length: int) -> float:
    """Mean probability of the whole answers, which are the last tokens of each datum."""
    logprobs = [sum(output["logprobs"].tolist()[-answer_length:]) for output in result.loss_fn_outputs]
    return sum(math.exp(logprob) for logprob in logprobs) / len(logprobs)


def reinforce(trainer: tinker.TrainingClient, task: Task, options: Options, taken: int) -> list[Step]:
    done: list[Step] = []
    bar = tqdm(range(options.steps), desc="reinforce")
    with (options.out / "metrics.jsonl").open("w") as file:
        for number in bar:
            step = reinforce_once(trainer, task, number, taken, None if options.unseeded else options.seed)
            done.append(step)
            file.write(json.dumps(asdict(step)) + "\n")
            tell(trainer, step)
            bar.set_postfix_str(
                f"reward {step.reward:.2f}, loss {step.loss:.1f}, {step.tokens_per_s:.0f} tokens/s"
            )
    return done


def tell(trainer: tinker.TrainingClient, step: Step) -> None:
    """Report numbers that only this script knows to the server's dashboard, if it has one."""
    values = {"reward": step.reward, "tokens_per_s": step.tokens_per_s}
    body = json.dumps({"step": step.step, "values": values})
    url = f"{os.environ['TINKER_BASE_URL'].rstrip('/')}/api/v1/console/runs/{trainer.model_id}/metrics"
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).close()
    except urllib.error.HTTPError as error:
        if error.code < 500 and error.code != 404:  # of a server without dashboard
            raise
    except OSError as error:  # training goes on while the server is started again
        print(f"not reported: {error}", file=sys.stderr)


def reinforce_once(
    trainer: tinker.TrainingClient, task: Task, number: int, taken: int, seed: int | None
) -> Step:
    """Sample from the newest weights, reward, and take one step; `taken`: steps of the warm-up."""
    started = time.monotonic()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    groups = sample_groups(sampler, task, None if seed is None else seed * 1_000_003 + number * 1009)
    data = [
        datum(
            prompt,
            answer.tokens,
            logprobs=answer.logprobs,
            advantages=[answer.advantage] * len(answer.tokens),
        )
        for prompt, answers in groups.items()
        for answer in answers
    ]
    passed = trainer.forward_backward(data, "importance_sampling")
    learning_rate = LEARNING_RATE * min(1.0, FULL_RATE_STEPS / (number + 1))
    stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    answers = [answer for group in groups.values() for answer in group]
    seconds = time.monotonic() - started
    tokens = sum(len(answer.tokens) for answer in answers) + sum(item.model_input.length for item in data)
    reward = sum(answer.reward for answer in answers) / len(answers)
    return Step(taken + number, reward, loss, tokens / seconds, seconds)


def sample_groups(
    sampler: tinker.SamplingClient, task: Task, seed: int | None
) -> dict[tuple[int, ...], list[Answer]]:
    """Sample a group of answers to every prompt; all prompts are in flight together."""
    asked = {
        prompt: sampler.sample(
            prompt=types.ModelInput.from_ints(list(prompt)),
            num_samples=GROUP_SIZE,
            sampling_params=types.SamplingParams(
                max_tokens=len(answer),
                temperature=1.0,
                seed=None if seed is None else seed + number * GROUP_SIZE,
            ),
        )
        for number, (prompt, answer) in enumerate(task.answers.items())
    }
    return {prompt: graded(task, prompt, future.result()) for prompt, future in asked.items()}


def graded(task: Task, prompt: tuple[int, ...], response: types.SampleResponse) -> list[Answer]:
    """Reward every answer; its advantage is how much better it was than the mean of its group."""
    rewards = [task.reward(prompt, sequence.tokens) for sequence in response.sequences]
    mean = sum(rewards) / len(rewards)
    return [
        Answer(list(sequence.tokens), list(sequence.logprobs or []), reward, reward - mean)
        for sequence, reward in zip(response.sequences, rewards, strict=True)
    ]


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: list[float]) -> types.Datum:
    """Position i of the input predicts target i; prompt positions do not count (inputs are 0 there)."""
    tokens = [*prompt, *answer]
    padding = [0.0] * (len(prompt) - 1)
    arrays = {name: np.array([*padding, *values], np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            **{name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
        },
    )


def report(steps: Sequence[Step], out: Path) -> bool:
    """Plot, print the paths, and return whether the end is well above the start."""
    rewards = [step.reward for step in steps]
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-5:])
    plot(rewards, out / "reward.png")
    better = min(2 * first, (1 + first) / 2)  # twice as good, or half of what was missing
    learned = first > 0 and last >= max(better, first + 0.25)
    print(f"mean reward of the first 3 steps {first:.3f}, of the last 5 steps {last:.3f}")
    print(f"{out / 'reward.png'}\n{out / 'metrics.jsonl'}")
    print("the policy learned" if learned else "the policy did NOT learn")
    return learned


def plot(rewards: Sequence[float], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(rewards, marker=".")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Reward while learning")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="for reward.png and metrics.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unseeded", action="store_true", help="for samples of SGLang, which takes no seeds")
    parser.add_argument(
        "--steps", type=int, default=40, help="after the warm-up; some 30 until it has learned"
    )
    parser.add_argument("--base-model", help="the one that is served, by default")
    parser.add_argument("--rank", type=int, default=32)
    sys.exit(0 if main(Options(**vars(parser.parse_args()))) else 1)
