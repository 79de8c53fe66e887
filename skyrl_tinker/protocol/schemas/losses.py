"""Losses that clients upload: a function as torch.fx recorded it, node by node."""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from skyrl_tinker.protocol.schemas.base import (
    Items,
    Message,
    SessionSeqId,
    StrictMessage,
    StrictRequest,
    Text,
)


class CustomLossInput(StrictMessage):
    """Input of a loss: `logprobs` or a key of loss_fn_inputs; rank 0 is a scalar, 1 [N], 2 [N, K]."""

    name: Text
    rank: Annotated[int, Strict(), Field(ge=0, le=2)]


class CustomLossNode(StrictMessage):
    """Call in the graph. Arguments: JSON values, or objects of one key (protocol.custom_loss_arguments)."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    keywords: dict[str, Any] = Field(default_factory=dict, alias="kwargs")


class CustomLossGraph(StrictMessage):
    """Graph of a loss; `nodes` in execution order."""

    format: Literal[1] = 1
    nodes: Items[CustomLossNode]


class CreateCustomLossRequest(StrictRequest):
    session_id: Text
    custom_loss_seq_id: SessionSeqId
    name: Text
    inputs: Items[CustomLossInput]
    graph: CustomLossGraph


class CreateCustomLossResult(Message):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
