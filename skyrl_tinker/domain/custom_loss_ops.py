"""Functions that an uploaded loss may call, by the names that torch.fx records, and their arguments.

Every other call is refused. Left out on purpose: operations that work in place, draw random numbers, turn
tensors into Python values, or make tensors whose size depends on their contents (except indexing by a mask).
`training.losses.custom_ops` holds the callables; a test holds the two equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_INT = 2**63 - 1


def returned(args: Sequence[Any]) -> tuple[Any, Mapping[str, Any]] | None:
    """Return loss and metrics, still encoded, from the arguments of an output node; None if absent."""
    value = args[0] if len(args) == 1 else None
    match value.get("tuple") if isinstance(value, dict) else value:
        case [loss, {"dict": dict(metrics)}]:
            return loss, metrics
    return None


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameter names of a call, in order. `variadic`: any number of positional arguments."""

    parameters: tuple[str, ...]
    variadic: bool = False


ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT", "values", "indices"})
DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "bool"})
STRINGS = frozenset({"sum", "mean", "none", "batchmean", "floor", "trunc", "cpu"})
"""The only strings allowed as arguments, beside the names of attributes."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "inplace": (False,),
    "out": (None,),
    "reduce": (None,),
    "size_average": (None,),
    "_stacklevel": (3,),
}
"""Keywords that torch adds to a recorded call, and their values that have no effect."""
ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""numpy's names of keywords, which torch takes too."""

_PREFIXES = {
    "torch._C._nn.log_sigmoid": "torch.nn.functional.logsigmoid",
    "torch._C._nn.": "torch.nn.functional.",
    "torch.functional.": "torch.",
}


def public_name(target: str) -> str:
    """Return the public name of a function that torch.fx names by the module that implements it."""
    for private, public in _PREFIXES.items():
        if target.startswith(private):
            return public + target.removeprefix(private)
    return target


def _table(*lines: tuple[str, str]) -> dict[str, Signature]:
    """Return signatures from (names, parameters), both separated by spaces; a star marks variadic ones."""
    return {
        name: Signature(tuple(parameters.replace("*", "").split()), variadic="*" in parameters)
        for names, parameters in lines
        for name in names.split()
    }


_BOTH = _table(
    ("abs neg sign exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sigmoid tanh relu", "input"),
    ("erf sin cos floor ceil trunc isfinite isnan isinf logical_not bitwise_not detach clone t", "input"),
    ("round", "input decimals"),
    ("mul eq ne lt le gt ge maximum minimum true_divide floor_divide fmod remainder", "input other"),
    ("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor logaddexp xlogy", "input other"),
    ("add sub", "input other alpha"),
    ("div", "input other rounding_mode"),
    ("pow", "input exponent"),
    ("lerp", "input end weight"),
    ("masked_fill", "input mask value"),
    ("clamp clip", "input min max"),
    ("clamp_min", "input min"),
    ("clamp_max", "input max"),
    ("nan_to_num", "input nan posinf neginf"),
    ("sum mean prod", "input dim keepdim dtype"),
    ("max min", "input dim keepdim other"),
    ("amax amin argmax argmin all any logsumexp median", "input dim keepdim"),
    ("std var", "input dim unbiased keepdim correction"),
    ("count_nonzero", "input dim"),
    ("softmax log_softmax cumsum cumprod", "input dim dtype"),
    ("logcumsumexp", "input dim"),
    ("dot", "input tensor"),
    ("sort argsort", "input dim descending stable"),
    ("topk", "input k dim largest sorted"),
    ("flatten", "input start_dim end_dim"),
    ("squeeze unsqueeze", "input dim"),
    ("transpose", "input dim0 dim1"),
    ("broadcast_to", "input size"),
    ("roll", "input shifts dims"),
    ("narrow", "input dim start length"),
    ("select", "input dim index"),
    ("gather", "input dim index"),
    ("tril triu", "input diagonal"),
)
METHODS: Mapping[str, Signature] = _BOTH | _table(
    ("float double half bfloat16 long int bool cpu contiguous numel dim", "self"),
    ("size", "self dim"),
    ("to", "self other dtype device"),
    ("type_as expand_as view_as", "self other"),
    ("where", "self condition other"),
    ("view reshape", "self *shape"),
    ("permute flip", "self *dims"),
    ("expand", "self *size"),
    ("repeat", "self *repeats"),
    ("new_zeros new_ones", "self *size dtype device"),
    ("new_full", "self size fill_value dtype device"),
)
_TORCH = _BOTH | _table(
    ("where", "condition input other"),
    ("cat concat concatenate stack", "tensors dim"),
    ("reshape", "input shape"),
    ("permute flip", "input dims"),
    ("zeros_like ones_like", "input dtype device"),
    ("full_like", "input fill_value dtype device"),
    ("zeros ones", "*size dtype device"),
    ("full", "size fill_value dtype device"),
    ("arange", "start end step dtype device"),
)
_FUNCTIONAL = _table(
    ("relu silu logsigmoid", "input"),
    ("softplus", "input beta threshold"),
    ("softmax log_softmax", "input dim dtype"),
    ("l1_loss", "input target reduction"),
    ("mse_loss", "input target reduction weight"),
    ("smooth_l1_loss", "input target reduction beta"),
    ("huber_loss", "input target reduction delta weight"),
    ("kl_div", "input target reduction log_target"),
    ("binary_cross_entropy_with_logits", "input target weight reduction pos_weight"),
)
_OPERATOR = _table(
    ("add sub mul truediv floordiv mod pow eq ne lt le gt ge and_ or_ xor", "a b"),
    ("neg pos abs invert", "a"),
    ("getitem", "a b"),
)
_MATH = _table(("exp expm1 log log1p log2 log10 sqrt fabs floor ceil", "x"), ("pow", "x y"))
FUNCTIONS: Mapping[str, Signature] = {
    "getattr": Signature(("object", "name")),
    **{f"torch.{name}": signature for name, signature in _TORCH.items()},
    **{f"torch.nn.functional.{name}": signature for name, signature in _FUNCTIONAL.items()},
    **{f"operator.{name}": signature for name, signature in _OPERATOR.items()},
    **{f"math.{name}": signature for name, signature in _MATH.items()},
}
