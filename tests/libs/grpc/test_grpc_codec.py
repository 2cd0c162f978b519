"""The protocol's protobuf messages: compiled from the file that is there, and the same as a stock client's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from shoal.libs.grpc import inference_pb2

ROOT = Path(__file__).parents[3]
PROTOCOL = ROOT / "platform" / "shoal" / "libs" / "grpc"
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"

# Prints every field and method that a stock client knows, as `ours` below does for ours.
DESCRIBE = """
import json
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

files = [FileDescriptorProto.FromString(each.DESCRIPTOR.serialized_pb) for each in (service_pb2, model_config_pb2)]
fields, values, methods = {}, {}, {}
def walk(message, prefix):
    for field in message.field:
        fields[f"{prefix}{message.name}.{field.name}"] = [field.number, field.label, field.type, field.type_name]
    for nested in message.nested_type:
        walk(nested, f"{prefix}{message.name}.")
for file in files:
    for message in file.message_type:
        walk(message, "")
    for enum in file.enum_type:
        values.update({f"{enum.name}.{value.name}": value.number for value in enum.value})
    for service in file.service:
        for each in service.method:
            kinds = [each.client_streaming, each.server_streaming]
            methods[f"{service.name}/{each.name}"] = [each.input_type, each.output_type, *kinds]
print(json.dumps([fields, values, methods]))
"""


def test_the_compiled_messages_are_those_of_the_file(tmp_path: Path) -> None:
    command = ["-m", "grpc_tools.protoc", "-I", PROTOCOL, f"--pyi_out={tmp_path}", "inference.proto"]
    subprocess.run(
        [sys.executable, *command, f"--descriptor_set_out={tmp_path / 'inference.binpb'}"], check=True, timeout=600
    )
    for name in ("inference.binpb", "inference_pb2.pyi"):
        assert (tmp_path / name).read_bytes() == (PROTOCOL / name).read_bytes(), f"{name} is stale: make proto"


def test_every_field_and_method_is_a_stock_client_s() -> None:
    done = subprocess.run([CLIENTS, "-c", DESCRIBE], check=True, capture_output=True, text=True, timeout=600)
    fields, values, methods = json.loads(done.stdout)
    file = FileDescriptorProto.FromString(inference_pb2.DESCRIPTOR.serialized_pb)
    ours: dict[str, Any] = {}

    def walk(message: Any, prefix: str) -> None:
        for field in message.field:
            ours[f"{prefix}{message.name}.{field.name}"] = [field.number, field.label, field.type, field.type_name]
        for nested in message.nested_type:
            walk(nested, f"{prefix}{message.name}.")

    for message in file.message_type:
        walk(message, "")
    assert len(ours) > 100
    assert {name: fields.get(name) for name in ours} == ours
    assert {f"DataType.{value.name}": value.number for value in file.enum_type[0].value} == values
    assert file.package == "inference"
    for each in file.service[0].method:
        kinds = [each.client_streaming, each.server_streaming]
        assert methods[f"{file.service[0].name}/{each.name}"] == [each.input_type, each.output_type, *kinds]


def test_another_implementation_of_the_protocol_may_live_in_the_same_process() -> None:
    """A served model may ask another server: its client registers the same names in protobuf's default pool."""
    program = """
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
file = FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
file.message_type.add(name="ModelInferRequest")
Default().Add(file)
from shoal.libs.grpc import inference_pb2
Default().FindMessageTypeByName("inference.ModelInferRequest")
print(inference_pb2.ModelInferRequest(model_name="a").model_name)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "a"
