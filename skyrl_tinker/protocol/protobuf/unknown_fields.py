"""Fields of a protobuf message that this server does not know, found by number."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def find_unknown_field(message: Message, where: str = "body") -> str | None:
    """Describe the first unknown field of the message or of one in it; `where` names the message."""
    if unknown := UnknownFieldSet(message):
        name, fields = message.DESCRIPTOR.name, message.DESCRIPTOR.fields
        known = ", ".join(f"{field.name} ({field.number})" for field in fields)
        return f"{where} has the unknown field number {unknown[0].field_number} of {name}, expected {known}"
    for name, inner in _messages_in(message):
        if (found := find_unknown_field(inner, f"{where}.{name}")) is not None:
            return found
    return None


def _messages_in(message: Any) -> Iterator[tuple[str, Message]]:
    """Yield name and value of each message directly in this one."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            continue
        value = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                yield from ((f"{field.name}[{key!r}]", value[key]) for key in sorted(value))
        elif field.is_repeated:
            yield from ((f"{field.name}[{index}]", each) for index, each in enumerate(value))
        elif message.HasField(field.name):
            yield field.name, value
