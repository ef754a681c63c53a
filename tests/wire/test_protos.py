"""Our subset of Envoy's messages, field by field against the published API."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from extproc.wire.pb import access_log_pb2, ext_proc_pb2

envoy = pytest.importorskip("envoy_data_plane.envoy")
import envoy_data_plane.envoy.config.core.v3 as core  # noqa: E402
import envoy_data_plane.envoy.data.accesslog.v3 as accesslog  # noqa: E402
import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as ext_proc_filter  # noqa: E402
import envoy_data_plane.envoy.service.accesslog.v3 as accesslog_service  # noqa: E402
import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc  # noqa: E402
import envoy_data_plane.envoy.type.v3 as types  # noqa: E402

ROOMS = (ext_proc, ext_proc_filter, core, accesslog, accesslog_service, types)
RENAMED = {
    "Identifier": "StreamAccessLogsMessageIdentifier",
    "HttpAccessLogEntries": "StreamAccessLogsMessageHttpAccessLogEntries",
}
KINDS = {
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_ENUM: "enum",
}
WITHOUT_FIELDS = {"HttpStatus"}
"""The published status is an enum of numbers; a plain number has the same bytes."""


def messages() -> list[Descriptor]:
    """Every message of ours, nested ones included, maps' entries left out."""
    found: list[Descriptor] = []

    def walk(message: Descriptor) -> None:
        if not message.GetOptions().map_entry:
            found.append(message)
            for nested in message.nested_types:
                walk(nested)

    for file in (ext_proc_pb2.DESCRIPTOR, access_log_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            walk(message)
    return found


def published(name: str) -> dict[str, Any]:
    """Fields of the published message of this name."""
    name = RENAMED.get(name, name)
    for room in ROOMS:
        if hasattr(room, name):
            fields = dataclasses.fields(getattr(room, name))
            return {field.name: meta for field in fields if (meta := field.metadata.get("betterproto"))}
    raise AssertionError(f"no published message {name}")


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.full_name)
def test_every_field_has_the_published_name_number_and_type(message: Descriptor) -> None:
    """A wrong number or type would be skipped silently by Envoy; so each is compared."""
    theirs = published(message.name)
    for field in message.fields:
        assert field.name in theirs, f"{message.name}.{field.name} is not published"
        other = theirs[field.name]
        assert field.number == other.number, f"{message.name}.{field.name}"
        if message.name not in WITHOUT_FIELDS:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            kind = "map" if is_map else KINDS[field.type]
            assert kind == other.proto_type, f"{message.name}.{field.name}"


def test_enums_have_the_published_numbers() -> None:
    """The kinds of records and the way headers are set."""
    ours = access_log_pb2.AccessLogType.items()
    theirs = {int(member): member.name for member in accesslog.AccessLogType}
    squeeze = str.maketrans("", "", "_")
    for name, number in ours:
        assert theirs[number].translate(squeeze).lower() == name.lower()
    for name, number in ext_proc_pb2.HeaderValueOption.HeaderAppendAction.items():
        assert core.HeaderValueOptionHeaderAppendAction(number).name == name
    for ours_, theirs_ in (
        (ext_proc_pb2.ProcessingMode.HeaderSendMode, ext_proc_filter.ProcessingModeHeaderSendMode),
        (ext_proc_pb2.ProcessingMode.BodySendMode, ext_proc_filter.ProcessingModeBodySendMode),
    ):
        theirs = {int(member): member.name for member in theirs_}
        assert all(theirs[number] == name for name, number in ours_.items())


def test_ours_can_live_beside_the_published_names() -> None:
    """Own package names: no clash in the default descriptor pool."""
    assert ext_proc_pb2.DESCRIPTOR.package == "tidegate.extproc.v3"
    assert access_log_pb2.DESCRIPTOR.package == "tidegate.accesslog.v3"
