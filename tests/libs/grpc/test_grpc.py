"""The protocol over gRPC without Ray: its messages, and what a stock client does not send, or does not see."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from libs.grpc.asking import refused, request, served, typed, until
from python_program import run_python
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.replica_server import LIMITS, exchange
from serving.replica_server import served as replica
from shoal.cluster.ports import find_free_port
from shoal.libs.grpc import inference_pb2
from shoal.libs.grpc.methods import METHODS, SERVICE, UNAUTHENTICATED_METHODS, UNSUPPORTED_METHODS
from shoal.serve.protocol.access import AccessControl

PATH = f"/{SERVICE}/ModelInfer"


class Silence(AsyncIterator[Any]):
    """Requests that never come."""

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()


async def test_without_a_key_only_the_server_s_health_is_told_and_nothing_of_a_call_is_read() -> None:
    wanted = dict.fromkeys(METHODS.keys() - UNAUTHENTICATED_METHODS, grpc.StatusCode.UNAUTHENTICATED)
    wanted |= dict.fromkeys(UNSUPPORTED_METHODS, grpc.StatusCode.UNIMPLEMENTED)

    async with served(FakeHost(), AccessControl("secret", [])) as ask:
        assert await ask("ServerLive")
        assert await ask("ServerReady")
        for name, code in wanted.items():
            error = await refused(anext(aiter(ask(name, Silence(), metadata=(("authorization", "Bearer no"),)))))
            assert error.code() is code, name
        twice = (("authorization", "Bearer secret"), ("authorization", "Bearer no"))  # a proxy may have checked one
        error = await refused(ask("ServerMetadata", metadata=twice))
        assert (error.code(), str(error.details())[:12]) == (grpc.StatusCode.INVALID_ARGUMENT, "several keys")


# -- a call, whatever its size -----------------------------------------------------------------------------------------


async def test_a_call_is_answered_with_its_metadata() -> None:
    model = FakeModel(versions=(3,))
    async with served(FakeHost(model)) as ask:
        for number in range(5):  # on one connection
            call = ask("ModelInfer", request(2, id=str(number)), metadata=(("shoal-sticky", "s"),))
            answer = await call
            assert (answer.id, answer.model_version, len(answer.raw_output_contents[0])) == (str(number), "3", 24)
            assert dict(await call.trailing_metadata()) == {"shoal-model-version": "3"}
        assert {each.sticky for each in model.calls} == {"s"}
        answers = await asyncio.gather(*(ask("ModelInfer", request(id=str(number))) for number in range(50)))
        assert [answer.id for answer in answers] == [str(number) for number in range(50)]


async def test_a_large_call_is_answered_whole() -> None:
    async with served(FakeHost(FakeModel("m", tensors(x=("UINT8", [-1, -1]))))) as ask:
        made = typed("m", "UINT8", [1, 1_000_000], raw_input_contents=[bytes(range(250)) * 4000])
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            answer = await ask("ModelInfer", made, compression=compression)
            assert answer.raw_output_contents[0] == made.raw_input_contents[0]


async def test_what_is_too_large_is_refused() -> None:
    model = FakeModel()
    async with served(FakeHost(model)) as ask:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = ask("ModelInfer", request(LIMITS.max_body_bytes // 12), compression=compression)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(LIMITS.max_body_bytes) in await call.details()
        assert not model.calls
        assert await ask("ModelInfer", request())


async def test_a_call_that_is_cancelled_leaves_the_model() -> None:
    model = FakeModel()
    model.hold = asyncio.Event()
    async with served(FakeHost(model)) as ask:
        call = ask("ModelInfer", request())
        await until(lambda: model.waiting == 1)
        call.cancel()
        await until(lambda: model.waiting == 0)


# -- what no client of gRPC sends -------------------------------------------------------------------------------------

FRAME = b"\0\0\0\0\x03\x0a\x01m"  # a request for the model m, without tensors
POST = f"POST {PATH} HTTP/1.1"
# what it is -> first line, body, header, the status of gRPC and words of the answer
WRONG: dict[str, tuple[str, bytes, str, int, bytes]] = {
    "an empty body": (POST, b"", "", 3, b"not one message"),
    "half a head": (POST, b"\0\0", "", 3, b"not one message"),
    "half a message": (POST, FRAME[:-1], "", 3, b"not one message"),
    "two messages": (POST, FRAME + FRAME, "", 3, b"not one message"),
    "no message of protobuf": (POST, b"\0\0\0\0\x02\xff\xff", "", 3, b"not a ModelInferRequest"),
    "what is not compressed": (POST, b"\1" + FRAME[1:], "grpc-encoding: gzip", 3, b"the body is not gzip"),
    "an unknown compression": (POST, b"\1" + FRAME[1:], "grpc-encoding: zstd", 12, b"not supported"),
    "a timeout that is a word": (POST, FRAME, "grpc-timeout: soon", 3, b"grpc-timeout"),
    "no tensors": (POST, FRAME, "grpc-timeout: 5S", 3, b"input 'x' is missing"),
    "another method of HTTP": (f"GET {PATH} HTTP/1.1", FRAME, "", 12, b"not served here"),
    "too many bytes of headers": (POST, FRAME, f"x: {'x' * 9000}", 8, b"the headers have"),
    "no method of the service": (f"POST /{SERVICE}/Nothing HTTP/1.1", FRAME, "", 12, b"not served here"),
}


async def test_a_wrong_call_is_refused() -> None:
    http_port = find_free_port()
    async with replica(FakeHost(), http_port):
        for what, (line, body, header, status, words) in WRONG.items():
            answer = await exchange(http_port, line, body, header)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), what
            assert b"content-length: 0\r\n" in answer, what
            assert b"grpc-status: %d\r\n" % status in answer, (what, answer)
            assert words in answer, (what, answer)
        live = await exchange(http_port, "GET /v2/health/live HTTP/1.1", b"", "")
        assert live.endswith(b'{"live":true}'), "other paths are REST's"


async def test_a_deadline_is_kept_by_the_replica_too_and_one_of_ages_is_none() -> None:
    """The client, and HAProxy, may go on waiting."""
    model, message = FakeModel(), request().SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message

    http_port = find_free_port()
    async with replica(FakeHost(model), http_port):
        for timeout, is_kept in (("99999999S", True), ("99999999H", False)):
            assert b"grpc-status: 0\r\n" in await exchange(http_port, POST, body, f"grpc-timeout: {timeout}")
            assert (model.calls[-1].deadline_s is not None) is is_kept
        model.hold = asyncio.Event()
        assert b"grpc-status: 4\r\n" in await exchange(http_port, POST, body, "grpc-timeout: 200m")
        assert model.waiting == 0


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
    assert run_python(program) == "a\n"
