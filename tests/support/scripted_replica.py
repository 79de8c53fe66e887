"""Stand-in for one vLLM server, which computes nothing. How requests reach it is up to who uses it.

tests/inference/client/test_sampling_port.py has what it shares with the real one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_tinker.domain.peft_config import ADAPTER_FILE
from skyrl_tinker.inference.client.http_connection import HttpStatusError
from skyrl_tinker.inference.constants import BASE_MODEL, START_VERSION

CONTEXT = 4096
POSITION = {"logprob": -0.5, "top_logprobs": [{"token_id": 1, "logprob": -0.5}]}
Draw = Callable[[Any, Sequence[int], int], Sequence[int]]
"""Return the tokens of a sequence, given its adapter or None, the prompt, and how many are asked for."""


def ones(adapter: Any, prompt: Sequence[int], most: int) -> Sequence[int]:
    return [1] * most


def require_adapter(directory: Path) -> Path:
    """Raise FileNotFoundError where there is none."""
    (directory / ADAPTER_FILE).stat()
    return directory


class ScriptedReplica:
    """Server of a base model, and of the adapters that it is told to load.

    A request takes `answer_s`, a load `load_s`. `read` makes an adapter of its directory, and `draw` chooses
    tokens; of so many drawn, `keep` tells how many are there when the request is aborted.
    """

    def __init__(self, answer_s: float = 0.0, load_s: float = 0.0, draw: Draw = ones) -> None:
        self.answer_s = answer_s
        self.load_s = load_s
        self.draw = draw
        self.read: Callable[[Path], Any] = require_adapter
        self.keep: Callable[[int], int] = lambda drawn: 0
        self.adapters: dict[str, Any] = {}
        self.running: dict[str, asyncio.Future[None]] = {}  # whose result aborts them
        self.version = START_VERSION
        self.sleeping = False
        self._going_on = asyncio.Event()
        self._going_on.set()

    async def answer(self, path: str, body: Mapping[str, Any], params: Mapping[str, str]) -> Any:
        """Return the content of an answer. Raises HttpStatusError."""
        match path:
            case "/inference/v1/generate":
                return await self._generate(body)
            case "/inference/v1/abort_requests":
                self._abort(body["request_ids"])
            case "/v1/load_lora_adapter":
                await self._load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter":
                self._unload(body["lora_name"])
            case "/pause" | "/sleep":
                await self._pause(params.get("mode", "abort"))
                self.sleeping = path == "/sleep" and params.get("level") != "0"
            case "/wake_up" if params.get("tags") == "scheduling" and self.sleeping:
                pass  # its memory is still away
            case "/wake_up":
                self.sleeping = False
                self._going_on.set()
            case "/update_weight_version":
                self.version = body["new_version"]
            case _:
                return self._state(path)
        return {}

    def _state(self, path: str) -> Any:
        base = {"id": BASE_MODEL, "max_model_len": CONTEXT + 1, "parent": None}
        adapters = [{"id": name, "parent": BASE_MODEL} for name in sorted(self.adapters)]
        states = {
            "/health": {},
            "/is_paused": {"is_paused": not self._going_on.is_set()},
            "/is_sleeping": {"is_sleeping": self.sleeping},
            "/weight_info": {"weight_version": self.version},
            "/get_world_size": {"world_size": 1},
            "/reset_prefix_cache": {"success": True},
            "/v1/models": {"data": [base, *adapters]},
        }
        if path not in states:
            raise HttpStatusError(404, f"{path} is not known")
        return states[path]

    async def _generate(self, body: Mapping[str, Any]) -> Any:
        model, sampling = body["model"], body["sampling_params"]
        if model != BASE_MODEL and model not in self.adapters:
            raise HttpStatusError(404, f"The model `{model}` does not exist.")
        most = sampling["max_tokens"]
        drawn = self.draw(self.held(model), body["token_ids"], most)
        tokens = _until(drawn[:most], sampling.get("stop_token_ids", ()))
        finish = "length" if len(tokens) == most else "stop"
        if await self._aborted(f"generate-tokens-{body.get('request_id')}"):
            tokens, finish = tokens[: self.keep(len(tokens))], "abort"
        choices = [self._choice(index, tokens, finish) for index in range(sampling.get("n", 1))]
        answer = {"choices": choices, "usage": {}, "model": model}
        if "prompt_logprobs" in sampling:
            answer["prompt_logprobs"] = [None, *({str(token): POSITION} for token in body["token_ids"][1:])]
        return answer

    def held(self, model: str) -> Any:
        """Return the adapter of this name, None for the base model."""
        return self.adapters.get(model)

    def _choice(self, index: int, tokens: Sequence[int], finish: str) -> Mapping[str, Any]:
        count = len(tokens)
        return {
            "index": index,
            "token_ids": tokens,
            "logprobs": {"content": [POSITION] * count},
            "finish_reason": finish,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }

    async def _aborted(self, name: str) -> bool:
        """Take the time of a request; return whether it was aborted meanwhile."""
        if not self.answer_s and self._going_on.is_set():
            return False
        running = self.running[name] = asyncio.get_running_loop().create_future()
        try:
            if not self._going_on.is_set():
                await self._stand_still(running)
            await asyncio.wait((running,), timeout=self.answer_s)
        finally:
            self.running.pop(name, None)
            ended = not running.done()
            running.cancel()
        if not ended:
            running.result()
        return not ended

    async def _stand_still(self, running: asyncio.Future[None]) -> None:
        pause = asyncio.ensure_future(self._going_on.wait())
        await asyncio.wait((running, pause), return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.running and not self.running[name].done():
                self.running[name].set_result(None)

    async def _pause(self, mode: str) -> None:
        running = tuple(self.running.values())
        if mode == "abort":
            self._abort(tuple(self.running))
        if mode == "wait" and running:
            await asyncio.wait(running)
        self._going_on.clear()

    async def _load(self, name: str, directory: str) -> None:
        if name in self.adapters:
            raise HttpStatusError(400, f"The lora adapter '{name}' has already been loaded.")
        if self.load_s:
            await asyncio.sleep(self.load_s)
        try:
            self.adapters[name] = self.read(Path(directory))
        except FileNotFoundError:
            raise HttpStatusError(404, f"No adapter found for {directory}") from None

    def _unload(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise HttpStatusError(404, f"The lora adapter '{name}' cannot be found.")


def _until(tokens: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    """Return the tokens up to the first that stops them."""
    ends = (index + 1 for index, token in enumerate(tokens) if token in stops)
    return tokens[: next(ends, len(tokens))] if stops else tokens
