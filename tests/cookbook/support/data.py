"""Small stand-ins for the hub's datasets, in directories of their names under a working directory."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RIGHT, ANSWERS = 3, (1, 2, 3, 4)  # the one that problems ask for, and those that a taught model gives
SUFFIXES = ("", " Write your answer in \\boxed{} format.")


def write_all(root: Path) -> None:
    """What the loops' recipes name: gsm8k, no_robots, hh-rlhf, DeepMath-103K and ToolAlpaca."""
    problems = [{"question": question(n), "answer": f"By adding.\n#### {RIGHT}"} for n in range(64)]
    write_dataset(root / "openai/gsm8k", "main", train=problems, test=problems[:2])
    write_dataset(root / "HuggingFaceH4/no_robots", "default", train=lessons(320), test=lessons(2))
    pairs = [{"chosen": dialogue(n, RIGHT), "rejected": dialogue(n, ANSWERS[0])} for n in range(32)]
    write_dataset(root / "Anthropic/hh-rlhf", "default", train=pairs, test=pairs[:2])
    prompts = [{"question": question(n)} for n in range(64)]
    write_dataset(root / "zwhe99/DeepMath-103K", "default", train=prompts)
    shown = [{"instruction": question(n), "output": f"\\boxed{{{RIGHT}}}"} for n in range(64)]
    write_dataset(root / "tangqiaoyu/ToolAlpaca", "default", train=shown)


def write_dataset(directory: Path, configuration: str, **splits: Iterable[Row]) -> None:
    """A directory that `datasets.load_dataset` takes for the hub's repository of that name."""
    files = []
    for split, rows in splits.items():
        write_jsonl(directory / f"{split}.jsonl", rows)
        files.append({"split": split, "path": f"{split}.jsonl"})
    header = json.dumps({"configs": [{"config_name": configuration, "data_files": files}]})
    (directory / "README.md").write_text(f"---\n{header}\n---\n")  # JSON is YAML


def write_jsonl(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def question(n: int) -> str:
    return f"What is {n} + {RIGHT} - {n}?"


def lessons(count: int, turns: int = 6) -> list[Row]:
    """Conversations that teach the form of an answer, and every answer alike."""
    rng = random.Random(0)
    return [{"messages": [message for _ in range(turns) for message in exchange(rng)]} for _ in range(count)]


def exchange(rng: random.Random) -> list[Row]:
    ask = question(rng.randrange(64)) + rng.choice(SUFFIXES)
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": f"\\boxed{{{rng.choice(ANSWERS)}}}"},
    ]


def dialogue(n: int, answer: int) -> str:
    return f"\n\nHuman: {question(n)}\n\nAssistant: \\boxed{{{answer}}}"
