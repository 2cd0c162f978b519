"""The protocol's protobuf messages, by name: `inference_pb2.ModelInferRequest` and so on, as in its stub.

Made when imported from `inference.binpb`, which `make proto` compiles from `inference.proto`. They live in a pool of
their own: every implementation of this protocol (tritonclient, kserve, open-inference-grpc) registers the same names in
protobuf's default pool, which refuses the second one, and a served model may import any of them.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass

_pool = DescriptorPool()
_pool.Add(FileDescriptorSet.FromString(Path(__file__).with_name("inference.binpb").read_bytes()).file[0])
DESCRIPTOR = _pool.FindFileByName("inference.proto")
globals().update({name: GetMessageClass(message) for name, message in DESCRIPTOR.message_types_by_name.items()})
DataType = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["DataType"])
