"""Our .proto beside the SDK's, in one process."""

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from tinker.proto import tinker_public_pb2 as sdk

from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as ours

_NEVER_SENT = {"SamplingParams", "StopStrings", "StopTokens"}


def _file(descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(proto)
    for message in proto.message_type:
        for part in (message, *message.nested_type):
            for field in part.field:
                field.type_name = field.type_name.replace(f".{proto.package}.", "")
    return proto


def _messages(descriptor: FileDescriptor) -> dict[str, descriptor_pb2.DescriptorProto]:
    return {message.name: message for message in _file(descriptor).message_type}


@pytest.mark.parametrize("name", sorted(set(_messages(sdk.DESCRIPTOR)) - _NEVER_SENT))
def test_every_message_has_the_fields_of_the_sdk(name: str) -> None:
    """Fields that only this server knows have numbers from 1000 on, which the SDK ignores."""
    theirs, mine = _messages(sdk.DESCRIPTOR)[name], _messages(ours.DESCRIPTOR)[name]
    assert sorted(str(field) for field in mine.field if field.number < 1000) == sorted(map(str, theirs.field))
    assert sorted(map(str, mine.nested_type)) == sorted(map(str, theirs.nested_type))
    assert [part.name for part in mine.oneof_decl] == [part.name for part in theirs.oneof_decl]


def test_enums_have_the_numbers_of_the_sdk() -> None:
    assert list(_file(ours.DESCRIPTOR).enum_type) == list(_file(sdk.DESCRIPTOR).enum_type)


def test_file_and_package_are_our_own() -> None:
    assert ours.DESCRIPTOR.name != sdk.DESCRIPTOR.name
    assert ours.DESCRIPTOR.package == "skyrl_tinker.protocol"
