"""Plain values of training, weights and base models, which cross module and process boundaries.

No I/O, no framework types; arrays are numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.ids import ModelId, ModelKey, RequestId, VersionId
from skyrl_tinker.domain.sampler_abilities import ALL_ABILITIES, SamplerAbilities
from skyrl_tinker.errors import Category, cut

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
RoutedExperts = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
"""Experts [tokens, layers, k] that tokens of a mixture were routed to; int16 for more than 256 of them."""
Number = npt.NDArray[np.float32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """Origin of `length` tokens or targets of a datum: tokens [offset, offset + length) of a sequence.

    `sampled`: offset counts the sequence's sampled tokens, else those of its prompt.
    """

    sequence_id: str
    offset: int
    length: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class ReplayedExperts:
    """Experts for the N tokens of a datum in place of the router's choice, where it is known."""

    experts: RoutedExperts  # [N, layers, k]
    known: npt.NDArray[np.bool_]  # [N]


@dataclass(frozen=True, slots=True)
class Datum:
    """One training example of N tokens: position i predicts token i+1, so targets are already shifted.

    K candidates may be scored at every position: target_tokens and their weights are then [N, K].
    """

    tokens: Int32  # [N]
    target_tokens: Int64  # [N] or [N, K]
    inputs: Mapping[str, Number]
    """By name in domain.loss_specs: float32, of the shape of target_tokens. Of the loss `custom` as sent:
    float32 or int64, of any shape with up to 2 dimensions."""
    spans: tuple[ProvenanceSpan, ...] = ()
    """Origin of the target tokens: the spans tile target_tokens, or there are none."""
    input_spans: tuple[ProvenanceSpan, ...] = ()
    """Origin of the tokens, read for router replay."""
    replayed: ReplayedExperts | None = None


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A client's own loss as data: checked, never executed as code. See training.losses.custom.

    `inputs`: (name, rank) of each input, `logprobs` first; rank 0 is a scalar, 1 [N], 2 [N, K].
    `nodes`: in execution order, as the client sent them (JSON values).
    """

    name: str
    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A validated forward or forward_backward request."""

    model_id: ModelId
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float]  # as sent, defaults not filled in
    forward_only: bool
    loss_id: str | None = None  # of the loss `custom`


OptimizerFamily = Literal["adamw", "dimuon"]
"""Chosen at the creation of a model."""
Way = Literal["shared memory", "pull", "gloo", "nccl", "cuda ipc"]
"""Way of weights to a replica. `pull`: it fetches the files over HTTP, once for all of its host."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """One AdamW step (decoupled weight decay). `grad_clip_norm` 0 = off, else the model's global L2 norm."""

    family: ClassVar[OptimizerFamily] = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """One Dimuon step. `beta1` is the momentum's. `grad_clip_norm` as in AdamParams, also off below 0."""

    family: ClassVar[OptimizerFamily] = "dimuon"
    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of a LoRA adapter. Rank 0 means full-parameter training; the other fields are then unused."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class PassItem:
    """One forward or forward_backward as the workers see it. `custom`: the checked loss of that name."""

    request_id: RequestId
    model: ModelKey
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float]
    backward: bool
    seq_id: int = 0
    custom: CustomLoss | None = None


@dataclass(frozen=True, slots=True)
class PassOutput:
    request_id: RequestId
    logprobs: tuple[Float32, ...]  # per datum, of the shape of its target_tokens
    metrics: Mapping[str, float]  # `name:reduction`, always with loss:sum


@dataclass(frozen=True, slots=True)
class StepItem:
    request_id: RequestId
    model: ModelKey
    params: AdamParams | DimuonParams


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of an optimizer step.

    `error` set: the step was refused (non-finite gradients, or parameters of another optimizer than the
    model's), weights unchanged, gradients cleared; or, if it is `exhausted`, there was no memory for it, and
    the gradients are kept.
    """

    request_id: RequestId
    metrics: Mapping[str, float]
    error: str | None = None
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """`node` as Ray names it, `index` as CUDA_VISIBLE_DEVICES does."""

    node: str
    index: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a request. `message`: kept as far as `errors.cut` does, without NUL."""

    message: str
    category: Category

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", cut(self.message).replace("\0", "\\0"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Training: those of its data. Sampling: the prompt, its cached part, and the generated part.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One immutable set of sampler weights: an adapter (PEFT directory) or full parameters (safetensors)."""

    id: VersionId
    kind: Literal["lora", "full"]
    directory: str

    @property
    def name(self) -> str:
        """Name of the version on the samplers; new for every version, so caches never go stale."""
        return f"v{self.id}"


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """Facts of the base model that the API and the engine need; written to the store by `serve`.

    `sampler`: of the engine that samples it.
    """

    directory: str  # absolute
    names: tuple[str, ...]  # names under which clients may ask for it; names[0] is the canonical one
    architecture: str
    vocab_size: int  # rows of the embedding: token ids are in [0, vocab_size)
    context_length: int  # maximum of prompt + generated tokens of one sequence
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    tied: bool
    eos_token_ids: tuple[int, ...]
    given: str = ""  # as --base-model or --also has it
    hub_name: str | None = None  # on the Hugging Face hub, if the model came from there
    num_heads: int = 0
    intermediate_size: int = 0  # of an MLP, or of each expert
    experts: int = 0  # in every layer; 0: an MLP
    experts_per_token: int = 1
    one_pair_for_gate_and_up: bool = False  # of an expert's adapter
    sampler: SamplerAbilities = ALL_ABILITIES
    trainable: bool = True  # False: sampled only
    sampleable: bool = True  # False: trained only

    @property
    def name(self) -> str:
        """Canonical name, the only one that is shown: others are accepted, as older sessions may use them."""
        return self.names[0]
