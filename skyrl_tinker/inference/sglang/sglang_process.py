"""Flags, environment and limits of a replica's SGLang process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.constants import BASE_MODEL, TOKEN
from skyrl_tinker.inference.servers.replica_spec import Arguments, ModelToServe, SamplerSpec, as_flags
from skyrl_tinker.inference.servers.sampler_memory import KV_CONTEXTS, require_memory
from skyrl_tinker.inference.sglang.sglang_entry import MARKS

if TYPE_CHECKING:
    from skyrl_tinker.inference.sglang.sglang_dialect import SglangDialect

ENTRY = Path(__file__).with_name("sglang_entry.py")
VERSION = "0.5.23"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that have been tested against the trainer's logprobs."""
TOOL_PARSERS = tuple(MARKS)
"""Parsers of tools, of the models that are served, which restrict no chats by a grammar.

Hermes reads the calls of `qwen`, too; `pythonic` is kept busy for minutes by a few words in brackets, and so
are all other requests.
"""
WITHOUT_ADAPTERS = {"Gemma3ForCausalLM": "head", "Qwen3MoeForCausalLM": "experts"}
"""Architectures with the part of which SGLang takes no adapters on a CPU."""


def require_model(served: ModelToServe) -> None:
    """Raise StartupError for an untested model, or one whose sequences would end at other tokens."""
    facts = served.facts
    if facts.architecture not in ARCHITECTURES:
        raise StartupError(f"sampler_engine: found {facts.architecture}, expected {', '.join(ARCHITECTURES)}")
    if served.adapters and (part := WITHOUT_ADAPTERS.get(facts.architecture)):
        raise StartupError(
            f"max_lora_rank: expected 0: SGLang does not start with adapters of the {part} of "
            f"{facts.architecture}"
        )
    if facts.tied and facts.architecture == "Qwen3MoeForCausalLM":
        raise StartupError(
            "config.json: tie_word_embeddings: expected false: SGLang gives "
            f"{facts.architecture} a head of its own"
        )
    if (window := _ignored_window(served)) is not None:
        raise StartupError(
            f"config.json: sliding_window: found {window}, expected null, or context_length at most that: "
            f"SGLang has no windows in {facts.architecture}"
        )
    if served.tool_parser not in (None, *TOOL_PARSERS):
        raise StartupError(
            f"tool_parser: found {served.tool_parser}, expected one of {', '.join(TOOL_PARSERS)}: SGLang's "
            "others are of other models, or restrict all chats with tools by a grammar"
        )
    if more := _ends(served) - set(facts.eos_token_ids):
        raise StartupError(
            f"generation_config.json: eos_token_id: expected also {sorted(more)}, of config.json or the "
            "tokenizer: SGLang ends sequences at all of them"
        )


def _ignored_window(served: ModelToServe) -> int | None:
    """Return the tokens of a window that SGLang would not have, though it would matter."""
    facts, config = served.facts, served.config
    windowed = config.get("use_sliding_window", facts.architecture == "MistralForCausalLM")
    window: int | None = config.get("sliding_window") if windowed else None
    return window if window is not None and window < facts.context_length else None


def _ends(served: ModelToServe) -> set[int]:
    """Return the end-of-sequence tokens of config.json and of the tokenizer, if they name any."""
    given: Any = served.config.get("eos_token_id")
    ends = set(given if isinstance(given, list) else [] if given is None else [given])
    directory = Path(served.facts.directory)
    named: Any = _read(directory / "tokenizer_config.json").get("eos_token")
    text = named["content"] if isinstance(named, dict) else named
    added = _read(directory / "tokenizer.json").get("added_tokens", ())
    return ends | {each["id"] for each in added if each["content"] == text}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def flags(spec: SamplerSpec, port: int, host: str) -> list[str]:
    """Return the arguments of a server."""
    cpu = {
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "lora-backend": "torch_native",
        "max-total-tokens": KV_CONTEXTS * spec.max_model_len,
        "disable-overlap-schedule": True,
        # With several, torch_native would give rows of the head to adapters of other sequences.
        "prefill-max-requests": 1,
    }
    adapters = {
        "enable-lora": True,
        "max-lora-rank": spec.max_lora_rank,
        "lora-target-modules": list(TARGETS),
        "max-loras-per-batch": spec.max_loras + 1,  # the base counts as one
        "max-loaded-loras": max(spec.max_cpu_loras, spec.max_loras + 1),
    }
    tools = {"tool-call-parser": spec.tool_parser} if spec.tool_parser else {}
    # A pause that retracts nothing would leave a step running while its weights change.
    gpu = {
        "mem-fraction-static": spec.gpu_memory_utilization,
        **({"disable-overlap-schedule": True} if spec.keeps_cache else {}),
    }
    arguments: Arguments = {
        "model-path": spec.model.directory,
        "served-model-name": BASE_MODEL,
        "host": host,
        "port": port,
        "device": spec.device,
        "dtype": spec.dtype,
        "context-length": spec.max_model_len,
        "tp-size": spec.tensor_parallel_size,
        "max-running-requests": spec.most_sequences,
        "grammar-backend": "llguidance",  # the default, xgrammar, refuses logits on a CPU
        "enable-cache-report": True,
        "skip-server-warmup": True,
        "log-level": "warning",
        "enable-metrics": True,
        "enable-priority-scheduling": True,
        "schedule-low-priority-values-first": True,
        "disable-priority-preemption": True,  # it would compute running requests again
        **(adapters if spec.max_lora_rank else {}),
        **tools,
        **(cpu if spec.device == "cpu" else gpu),
    }
    return as_flags(arguments)


@dataclass(frozen=True)
class SglangProcess:
    """`python`: an interpreter whose environment has SGLang; None: our own."""

    python: Path | None = None
    arguments: Arguments = field(default_factory=dict, init=False)  # users give none
    title = "SGLang"
    leftovers = ()
    torch_groups = True
    cores = 1
    abilities = SamplerAbilities(
        "SGLang",
        lowest_temperature=1e-6,  # below, SGLang samples greedily
        most_stop_strings=32,
        most_target_scores=1 << 18,  # the whole answer is one text
        seed=False,
        prompt_alt_tokens_k=False,
        router_replay=False,
        fewest_tokens=1,
        add_special_tokens=False,
        response_format=True,
        streamed_chat_logprobs=False,  # those of a token that ends within a character are lost
        reasoning_parser=False,
        strict_tools=False,  # its grammars take a parser's marks for tokens, which tokenizers may lack
        parallel_tool_calls=False,
        processed_logprobs=False,
        prefill_urls=False,
        router_url=False,  # the router drops fields of /generate, such as `priority` and `top_logprobs_num`
        colocated=False,
        ray_address=False,
    )
    require_model = staticmethod(require_model)
    require_memory = staticmethod(require_memory)

    @property
    def dialect(self) -> "SglangDialect":
        from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG  # `serve` itself does without it

        return SGLANG

    def check(self) -> None:
        """Refuse an interpreter without the supported release of SGLang."""
        python = str(self.python or sys.executable)
        asked = [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
        try:
            found = (
                subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "none"
            )
        except OSError as error:
            raise StartupError(f"sampler_python: {error}") from error
        if found != VERSION:
            raise StartupError(
                f"sampler_python: found sglang {found} in the environment of {python}, expected {VERSION}"
            )

    def workers(self, tensor_parallel_size: int) -> int:
        return tensor_parallel_size

    def expert_slot_rank(self, rank: int, experts_per_token: int) -> int:
        return rank

    def command(self, spec: SamplerSpec, port: int, host: str) -> list[str]:
        return [str(self.python or sys.executable), "-P", str(ENTRY), TOKEN, *flags(spec, port, host)]

    def environment(
        self, spec: SamplerSpec, replica: int, interface: str, inherited: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        common = {
            TOKEN: spec.token,
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a generation does not end in a pause
            "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",  # else calls of other names than the tools' are text
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # context + 1: the last token is never fed
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": spec.network_interface or interface,
        }
        cpu = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # by which a grammar's first mask would need a compiler of C++
        }
        return {**inherited, **common, **(cpu if spec.device == "cpu" else {})}
