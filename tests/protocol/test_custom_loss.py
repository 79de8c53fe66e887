"""Calls allowed in an uploaded loss: all others are refused by the name of their node."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyrl_tinker
from skyrl_tinker.domain.custom_loss_ops import ATTRIBUTES, FUNCTIONS, METHODS
from skyrl_tinker.domain.values import CustomLoss, Datum, Number
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss import (
    MAX_BYTES,
    as_declared,
    check_custom_loss,
    from_bytes,
    to_bytes,
)
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest

Json = dict[str, Any]


def call(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> Json:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def placeholder(name: str) -> Json:
    return call(name, name, op="placeholder")


def ref(name: str) -> Json:
    return {"ref": name}


L = ref("logprobs")
EXP = call("exp", "torch.exp", L)
TOTAL = call("total", "sum", ref("exp"), op="call_method")


def output(loss: Any = ref("total"), **metrics: Any) -> Json:  # noqa: B008
    return call("output", "output", {"tuple": [loss, {"dict": metrics}]}, op="output")


def request(*nodes: Json, inputs: tuple[tuple[str, int], ...] = (("logprobs", 1),), name: str = "f") -> Json:
    return {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": name,
        "inputs": [{"name": name, "rank": rank} for name, rank in inputs],
        "graph": {"format": 1, "nodes": list(nodes)},
    }


def check(payload: Json) -> CustomLoss:
    return check_custom_loss(parse(CreateCustomLossRequest, payload))


GOOD = request(placeholder("logprobs"), EXP, TOTAL, output(**{"custom/a:sum": ref("exp")}))


def with_call(*calls: Json) -> Json:
    return request(placeholder("logprobs"), *calls, TOTAL, output())


def with_argument(value: Any) -> Json:
    return with_call(call("exp", "torch.clamp", L, value))


def test_a_good_loss_is_kept_as_it_was_sent() -> None:
    loss = check(GOOD)
    assert (loss.name, loss.inputs) == ("f", (("logprobs", 1),))
    assert list(loss.nodes) == GOOD["graph"]["nodes"]
    assert from_bytes(to_bytes(loss)) == loss


ACCEPTED = {
    "all kinds of constants": with_argument(
        [{"float": "-inf"}, {"slice": [1, None, L]}, {"tuple": [True, 2.5, None]}, {"ellipsis": True}]
    ),
    "dtype and device": with_call(
        call("exp", "torch.zeros_like", L, dtype={"dtype": "float64"}, device={"device": "cpu"})
    ),
    "what torch adds by itself": with_call(
        call("exp", "torch.nn.functional.softmax", L, dim=-1, _stacklevel=3, dtype=None)
    ),
    "private names of torch": with_call(call("exp", "torch._C._nn.softplus", L)),
    "numpy's words": with_call(call("exp", "softmax", L, axis=-1, op="call_method")),
    "an attribute": with_call(call("exp", "torch.full_like", L, 1.0), call("s", "getattr", L, "shape")),
    "a list in place of a tuple": request(
        placeholder("logprobs"),
        EXP,
        TOTAL,
        call("output", "output", [ref("total"), {"dict": {}}], op="output"),
    ),
    "an input under another name of node": request(
        placeholder("logprobs"),
        call("input_1", "input", op="placeholder"),
        EXP,
        TOTAL,
        output(),
        inputs=(("logprobs", 2), ("input", 0)),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_torch_fx_records_is_accepted(case: str) -> None:
    check(ACCEPTED[case])


FORBIDDEN = (
    "os.system", "builtins.eval", "eval", "torch.load", "torch.ops.aten.add", "torch.rand_like",
    "torch.bernoulli", "torch.nn.functional.dropout", "torch.exp_", "operator.iadd",
    "operator.methodcaller", "operator.attrgetter", "operator.setitem", "math.factorial",
    "torch.Tensor.exp", "torch.utils.cpp_extension.load", "torch.compile", "torch.nonzero",
    "torch.matmul", "torch.special.expit", "_operator.add", "subprocess.run", "", "exp",
)  # fmt: skip
FORBIDDEN_METHODS = (
    "exp_", "item", "tolist", "numpy", "backward", "register_hook", "__reduce__", "__class__", "set_",
    "resize_", "as_strided", "data_ptr", "storage", "random_", "requires_grad_", "apply_", "map_",
    "share_memory_", "unbind", "type", "new", "where_", "torch.exp",
)  # fmt: skip


@pytest.mark.parametrize("target", FORBIDDEN)
def test_functions_that_are_not_listed_are_refused(target: str) -> None:
    with pytest.raises(
        UserError, match=r"node 'exp': call_function .* not among .* may call.*torch\.logsumexp"
    ):
        check(with_call(call("exp", target, L)))


@pytest.mark.parametrize("target", FORBIDDEN_METHODS)
def test_methods_that_are_not_listed_are_refused(target: str) -> None:
    with pytest.raises(UserError, match=r"node 'exp': call_method .* not among .* may call.*masked_fill"):
        check(with_call(call("exp", target, L, op="call_method")))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "an unknown node": (ref("nobody"), "'nobody', expected a ref to an earlier node"),
    "itself": (ref("exp"), "'exp', expected a ref to an earlier node"),
    "a later node": (ref("total"), "expected a ref to an earlier node"),
    "a ref that is no name": ({"ref": ["logprobs"]}, "expected ref, tuple"),
    "two keys": ({"ref": "logprobs", "tuple": []}, "an object of one key"),
    "an unknown kind": ({"code": "1+1"}, "expected ref, tuple"),
    "a dictionary": ({"dict": {"a": 1}}, "expected ref, tuple"),
    "a layout": ({"layout": "strided"}, "expected ref, tuple"),
    "a type of ours": ({"dtype": "complex64"}, "float32"),
    "an attribute of torch": ({"dtype": "nn"}, "float32"),
    "a device": ({"device": "cuda:0"}, "the server chooses"),
    "a float that is none": ({"float": "1e999"}, "inf, -inf, nan"),
    "a slice of two": ({"slice": [1, 2]}, "expected ref, tuple"),
    "text": ("__import__('os')", "no text but"),
    "a huge integer": (2**63, "64 bits"),
    "an integer that no JSON writer takes": (2**70, "1180591620717411303424, expected an integer of 64 bits"),
    "nesting": (nested(50), "nested at most 6 deep"),
    "very many values": ([1] * 300, "at most 256 values"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments_are_named(case: str) -> None:
    value, message = ARGUMENTS[case]
    with pytest.raises(UserError, match=rf"node 'exp' \(torch.clamp\): .*{message}"):
        check(with_argument(value))


GRAPHS: dict[str, tuple[Json, str]] = {
    "out": (with_call(call("exp", "torch.exp", L, out=L)), r"node 'exp' .*out is \{'ref': 'logprobs'\}"),
    "inplace": (with_call(call("exp", "torch.nn.functional.relu", L, inplace=True)), "inplace is True"),
    "an unknown keyword": (
        with_call(call("exp", "torch.exp", L, generator=None)), "keyword 'generator'.*input"
    ),
    "too many arguments": (with_call(call("exp", "torch.exp", L, L)), "2 arguments, expected at most input"),
    "a private attribute": (with_call(call("exp", "getattr", L, "__class__")), "node 'exp' .*name of one of"),
    "data": (with_call(call("exp", "getattr", L, "data")), "name of one of"),
    "a name that is no text": (with_call(call("exp", "getattr", L, ["shape"])), "name of one of"),
    "a computed name": (with_call(call("exp", "getattr", L, ref("logprobs"))), "name of one of"),
    "a default": (with_call(call("exp", "getattr", L, "shape", 1)), "name of one of|at most object, name"),
    "get_attr": (with_call(call("exp", "weight", op="get_attr")), "node 'exp': op 'get_attr' holds a tensor"),
    "call_module": (with_call(call("exp", "net", L, op="call_module")), "node 'exp': op 'call_module'"),
    "two nodes of a name": (with_call(EXP, EXP), r"nodes\[2\]\.name is 'exp'"),
    "a name with spaces": (with_call(call("e x", "torch.exp", L)), r"nodes\[1\]\.name"),
    "a long name": (with_call(call("e" * 200, "torch.exp", L)), r"nodes\[1\]\.name"),
    "an integer beside a ref": (
        request(placeholder("logprobs"), EXP, output({**L, "x": 2**64})), "graph.nodes: .*64 bits"
    ),
    "no output": (request(placeholder("logprobs"), EXP), "one output node, the last"),
    "an early output": (request(placeholder("logprobs"), output(L), TOTAL), "one output node, the last"),
    "nothing": (request(), "0 nodes"),
    "very many nodes": (with_call(*(call(f"n{i}", "torch.exp", L) for i in range(1000))), "1003 nodes"),
    "very many bytes": (
        with_call(EXP, *(call("n" * 120 + str(i), "torch.clamp", [1.234567] * 200) for i in range(300))),
        f"at most {MAX_BYTES}",
    ),
    "a missing placeholder": (
        request(placeholder("logprobs"), EXP, TOTAL, output(), inputs=(("logprobs", 1), ("w", 1))),
        "no placeholder for the input 'w'",
    ),
    "a placeholder too many": (
        request(placeholder("logprobs"), placeholder("w"), EXP, TOTAL, output()),
        "placeholder 'w', expected no more inputs",
    ),
    "placeholders in another order": (
        request(
            placeholder("w"), placeholder("logprobs"), EXP, output(L), inputs=(("logprobs", 1), ("w", 1))
        ),
        "expected the input 'logprobs'",
    ),
    "a placeholder with a default": (
        request(call("logprobs", "logprobs", 1.0, op="placeholder"), EXP, TOTAL, output()),
        "without a default",
    ),
    "inputs without logprobs": (request(EXP, TOTAL, output(), inputs=(("w", 1),)), r"inputs\[0\] is 'w'"),
    "logprobs that are one number": (
        request(placeholder("logprobs"), EXP, TOTAL, output(), inputs=(("logprobs", 0),)),
        r"inputs\[0\] is 'logprobs' of rank 0",
    ),
    "an input twice": (
        request(placeholder("logprobs"), inputs=(("logprobs", 1), ("logprobs", 1))),
        r"inputs\[1\].name is 'logprobs', expected each name once|1 nodes",
    ),
    "an input with a bad name": (
        request(placeholder("logprobs"), inputs=(("logprobs", 1), ("__x.y", 1))), r"inputs\[1\].name"
    ),
    "very many inputs": (
        request(placeholder("logprobs"), inputs=(("logprobs", 1), *((f"x{i}", 1) for i in range(16)))),
        "17 entries",
    ),
    "no name": (with_call(EXP) | {"name": ""}, "name has 0 characters"),
    "a loss that is a number": (request(placeholder("logprobs"), output(1.0)), "the loss is not the value"),
    "an unknown loss": (request(placeholder("logprobs"), output(ref("x"))), "the loss is not the value"),
    "a metric that is a number": (
        request(placeholder("logprobs"), output(L, **{"custom/a:sum": 1})),
        "custom/a:sum is not the value",
    ),
    "a metric of ours": (
        request(placeholder("logprobs"), output(L, **{"loss:sum": L})), "metric 'loss:sum', expected a match"
    ),
    "a metric with another reduction": (
        request(placeholder("logprobs"), output(L, **{"custom/a:max": L})), "custom/a:max"
    ),
    "very many metrics": (
        request(placeholder("logprobs"), output(L, **{f"custom/a{i}:sum": L for i in range(65)})),
        "65 metrics",
    ),
    "a single output": (
        request(placeholder("logprobs"), call("output", "output", L, op="output")),
        r"expected the output \(loss, dictionary",
    ),
    "metrics that are no dictionary": (
        request(placeholder("logprobs"), call("output", "output", {"tuple": [L, [L]]}, op="output")),
        r"expected the output \(loss, dictionary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GRAPHS)
def test_bad_graphs_are_refused_by_name(case: str) -> None:
    payload, message = GRAPHS[case]
    with pytest.raises(UserError, match=message) as failure:
        check(payload)
    assert len(str(failure.value)) < 5000


FORMS: dict[str, tuple[Callable[[Json], Json], str]] = {
    "another format": (lambda p: p | {"graph": p["graph"] | {"format": 2}}, "graph.format"),
    "another op": (lambda p: p | {"graph": {"nodes": [EXP | {"op": "exec"}]}}, r"graph.nodes.0.op"),
    "no graph": (lambda p: {key: value for key, value in p.items() if key != "graph"}, "graph is missing"),
    "rank 3": (lambda p: p | {"inputs": [{"name": "logprobs", "rank": 3}]}, r"inputs.0.rank"),
    "arguments that are no list": (lambda p: p | {"graph": {"nodes": [EXP | {"args": {}}]}}, r"nodes.0.args"),
    "a negative number": (lambda p: p | {"custom_loss_seq_id": -1}, "custom_loss_seq_id"),
}


@pytest.mark.parametrize("case", FORMS)
def test_bodies_of_another_form_are_refused(case: str) -> None:
    change, message = FORMS[case]
    with pytest.raises(UserError, match=message):
        check(change(GOOD))


def datum(shape: tuple[int, ...] = (3,), **inputs: Number) -> Datum:
    return Datum(np.zeros(3, np.int32), np.zeros(shape, np.int64), inputs)


def test_data_must_have_what_the_loss_takes() -> None:
    loss = CustomLoss("f", (("logprobs", 1), ("w", 0)), ())
    good = datum(w=np.zeros((), np.float32))
    as_declared(loss, [good, good])
    with pytest.raises(UserError, match=r"datum 1: loss_fn_inputs lacks 'w', which loss 'f' takes"):
        as_declared(loss, [good, datum()])
    with pytest.raises(UserError, match=r"datum 0: loss_fn_inputs\['w'\] has rank 1, expected 0"):
        as_declared(loss, [datum(w=np.zeros(3, np.float32))])
    with pytest.raises(UserError, match=r"datum 1: loss_fn_inputs\['target_tokens'\] has rank 2, expected 1"):
        as_declared(loss, [good, datum((3, 2))])


def test_one_value_without_a_shape_is_an_array_for_a_datum_of_one_token() -> None:
    loss, value = CustomLoss("f", (("logprobs", 1), ("w", 1)), ()), {"w": np.zeros((), np.float32)}
    (declared,) = as_declared(loss, [Datum(np.zeros(1, np.int32), np.zeros(1, np.int64), value)])
    assert declared.inputs["w"].shape == (1,)
    with pytest.raises(UserError, match=r"datum 0: loss_fn_inputs\['w'\] has rank 0, expected 1"):
        as_declared(loss, [datum(**value)])


def test_the_page_on_custom_losses_lists_what_they_may_call() -> None:
    page = (Path(skyrl_tinker.__file__).parents[1] / "docs" / "custom-losses.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page.partition("## Limits")[0]))
    functions = {
        name.rpartition(".")[2] for name in FUNCTIONS if not name.startswith(("operator.", "getattr"))
    }
    assert functions | METHODS.keys() | ATTRIBUTES <= listed
    assert listed - functions - METHODS.keys() - ATTRIBUTES == {"torch", "math", "eval", "None"}
