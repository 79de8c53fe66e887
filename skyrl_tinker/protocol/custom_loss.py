"""Uploaded losses, checked before they are stored: only calls listed in `domain.custom_loss_ops`.

These checks need the graph alone. Parts that depend on data (shapes, sizes, time) are bounded while the loss
runs: training.losses.custom_graph.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import orjson
from pydantic import TypeAdapter

from skyrl_tinker.domain.custom_loss_ops import FUNCTIONS, METHODS, public_name, returned
from skyrl_tinker.domain.values import CustomLoss, Datum
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss_arguments import check_arguments
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest, CustomLossInput, CustomLossNode

MAX_NODES = 1000
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_NAME = 128
MAX_BYTES = 256 << 10
"""Bound of the nodes as compact JSON."""

_LOSS = TypeAdapter(CustomLoss)
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME - 1}}}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_REFUSED = {
    "get_attr": "holds a tensor or module from outside the loss, expected only inputs of the loss",
    "call_module": "calls a torch.nn module, expected functions such as torch.nn.functional",
}


def check_custom_loss(request: CreateCustomLossRequest) -> CustomLoss:
    """Return the loss, or raise UserError that names the node, the value found, and the values allowed."""
    if not 0 < len(request.name) <= MAX_NAME:
        raise UserError(f"name has {len(request.name)} characters, expected 1 to {MAX_NAME}")
    _check_inputs(request.inputs)
    nodes = request.graph.nodes
    if not 0 < len(nodes) <= MAX_NODES:
        raise UserError(f"graph.nodes has {len(nodes)} nodes, expected 1 to {MAX_NODES}")
    loss = CustomLoss(
        name=request.name,
        inputs=tuple((item.name, item.rank) for item in request.inputs),
        nodes=tuple(node.model_dump(by_alias=True) for node in nodes),
    )
    _check_nodes(nodes, [item.name for item in request.inputs])
    try:
        size = len(orjson.dumps(loss.nodes))
    except orjson.JSONEncodeError as error:  # beside the keys that the checks read
        raise UserError(f"graph.nodes: {error}, expected integers of 64 bits") from error
    if size > MAX_BYTES:
        raise UserError(f"graph.nodes takes {size} bytes of JSON, expected at most {MAX_BYTES}")
    return loss


def as_declared(loss: CustomLoss, data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Return the data with inputs of the ranks that the loss declares.

    Raises UserError naming the first datum that lacks an input, or has it in another rank.
    """
    return tuple(_as_declared(loss, f"datum {index}", datum) for index, datum in enumerate(data))


def _as_declared(loss: CustomLoss, where: str, datum: Datum) -> Datum:
    (_, rank), *others = loss.inputs
    _check_rank(f"{where}: loss_fn_inputs['target_tokens']", datum.target_tokens.ndim, rank, loss)
    inputs = {**datum.inputs}
    for name, expected in others:
        if name not in inputs:
            raise UserError(f"{where}: loss_fn_inputs lacks {name!r}, which loss {loss.name!r} takes")
        if (inputs[name].ndim, expected, len(datum.tokens)) == (0, 1, 1):  # one value without a shape
            inputs[name] = inputs[name].reshape(1)
        _check_rank(f"{where}: loss_fn_inputs[{name!r}]", inputs[name].ndim, expected, loss)
    return replace(datum, inputs=inputs)


def to_bytes(loss: CustomLoss) -> bytes:
    """Return the stored form."""
    return orjson.dumps(loss, option=orjson.OPT_SORT_KEYS)


def from_bytes(stored: bytes) -> CustomLoss:
    return _LOSS.validate_json(stored)


def _check_rank(field: str, rank: int, expected: int, loss: CustomLoss) -> None:
    if rank != expected:
        raise UserError(f"{field} has rank {rank}, expected {expected}, as loss {loss.name!r} declares")


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [item.name for item in inputs]
    if not 0 < len(names) <= MAX_INPUTS:
        raise UserError(f"inputs has {len(names)} entries, expected 1 to {MAX_INPUTS}")
    if names[0] != "logprobs" or inputs[0].rank == 0:
        raise UserError(
            f"inputs[0] is {names[0]!r} of rank {inputs[0].rank}, expected 'logprobs' of rank 1 or 2"
        )
    for index, name in enumerate(names):
        if not _INPUT.fullmatch(name):
            raise UserError(
                f"inputs[{index}].name is {name[:MAX_NAME]!r}, expected a match of {_INPUT.pattern}"
            )
        if name in names[:index]:
            raise UserError(f"inputs[{index}].name is {name!r}, expected each name once")


def _check_nodes(nodes: Sequence[CustomLossNode], inputs: Sequence[str]) -> None:
    known: set[str] = set()
    left = iter(inputs)
    for index, node in enumerate(nodes):
        if not _NODE.fullmatch(node.name) or node.name in known:
            raise UserError(
                f"graph.nodes[{index}].name is {node.name[:MAX_NAME]!r}, "
                f"expected a name that no other node has and that matches {_NODE.pattern}"
            )
        if (node.op == "output") != (index == len(nodes) - 1):
            raise UserError(f"node {node.name!r}: op is {node.op!r}, expected one output node, the last")
        _check_node(node, known, left)
        known.add(node.name)
    for missing in left:
        raise UserError(f"graph.nodes has no placeholder for the input {missing!r}")


def _check_node(node: CustomLossNode, known: set[str], inputs: Iterator[str]) -> None:
    where = f"node {node.name!r}"
    match node.op:
        case "placeholder":
            _check_placeholder(node, next(inputs, None))
        case "output":
            _check_output(node, known)
        case "call_function" | "call_method":
            _check_call(node, known)
        case refused:
            raise UserError(f"{where}: op {refused!r} {_REFUSED[refused]}")


def _check_placeholder(node: CustomLossNode, expected: str | None) -> None:
    if node.target != expected or node.args or node.keywords:
        required = "no more inputs" if expected is None else f"the input {expected!r}, without a default"
        raise UserError(f"node {node.name!r}: placeholder {node.target[:MAX_NAME]!r}, expected {required}")


def _check_call(node: CustomLossNode, known: set[str]) -> None:
    function = node.op == "call_function"
    table, kind = (FUNCTIONS, "functions") if function else (METHODS, "tensor methods")
    target = public_name(node.target) if function else node.target
    if target not in table:
        raise UserError(
            f"node {node.name!r}: {node.op} {node.target[:MAX_NAME]!r} is not among the {kind} that a custom "
            f"loss may call on the server: {', '.join(sorted(table))}"
        )
    check_arguments(node, target, table[target], known)


def _check_output(node: CustomLossNode, known: set[str]) -> None:
    where = f"node {node.name!r}"
    output = returned(node.args)
    if output is None or node.keywords:
        raise UserError(f"{where}: expected the output (loss, dictionary of metrics)")
    loss, metrics = output
    if len(metrics) > MAX_METRICS:
        raise UserError(f"{where}: found {len(metrics)} metrics, expected at most {MAX_METRICS}")
    for key in metrics:
        if not _METRIC.fullmatch(key):
            raise UserError(f"{where}: metric {key[:MAX_NAME]!r}, expected a match of {_METRIC.pattern}")
    for what, value in (("the loss", loss), *metrics.items()):
        ref = value.get("ref") if isinstance(value, dict) else None
        if not isinstance(ref, str) or ref not in known:
            raise UserError(f"{where}: {what} is not the value of an earlier node")
