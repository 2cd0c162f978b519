"""The protocol, driven as a bare ASGI application: no socket, no Ray, no torch."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.batcher import QueueFull
from shoal.serve.open_inference import OpenInferenceApp
from shoal.serve.tensors import DTYPES, TensorCodec

SIGNATURE = Signature(
    inputs=[
        TensorSignature(name="x", datatype="FP32", shape=[-1, 3]),
        TensorSignature(name="mask", datatype="BOOL", shape=[-1]),
    ],
    outputs=[
        TensorSignature(name="y", datatype="FP32", shape=[-1, 3]),
        TensorSignature(name="n", datatype="INT64", shape=[-1]),
    ],
)


@dataclass(frozen=True)
class Answer:
    outputs: dict[str, np.ndarray]
    version: int


@dataclass
class FakeModel:
    """y = 2x, n = the number of the row; `error` is raised instead when set."""

    version: int = 7
    error: Exception | None = None
    seen: list[dict[str, np.ndarray]] = field(default_factory=list)

    async def infer(self, inputs: dict[str, np.ndarray], num_rows: int) -> Answer:
        if self.error is not None:
            raise self.error
        assert {len(array) for array in inputs.values()} == {num_rows}
        self.seen.append(inputs)
        return Answer({"y": inputs["x"] * 2, "n": np.arange(num_rows)}, self.version)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Client:
    """Calls an application as a server would."""

    app: OpenInferenceApp
    root_path: str = ""

    def request(
        self,
        method: str,
        path: str,
        chunks: list[bytes] | None = None,
        headers: dict[str, str] | None = None,
        claim_length: bool = True,
    ) -> Reply:
        chunks = [b""] if chunks is None else chunks
        all_headers = dict(headers or {})
        if claim_length:
            all_headers.setdefault("content-length", str(sum(map(len, chunks))))
        scope = {
            "type": "http",
            "method": method,
            "path": self.root_path + path,
            "root_path": self.root_path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
        }
        messages = [
            {"type": "http.request", "body": chunk, "more_body": number + 1 < len(chunks)}
            for number, chunk in enumerate(chunks)
        ]
        self.unread = messages
        return asyncio.run(self._call(scope, messages))

    async def _call(self, scope: dict[str, Any], messages: list[dict[str, Any]]) -> Reply:
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start, *bodies = sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        body = b"".join(message["body"] for message in bodies)
        assert headers["content-type"] == "application/json"
        assert headers["content-length"] == str(len(body))
        return Reply(start["status"], headers, json.loads(body))

    def get(self, path: str, **more: Any) -> Reply:
        return self.request("GET", path, **more)

    def infer(self, content: object, path: str = "/v2/models/m/infer", **more: Any) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.request("POST", path, [body], **more)


def client(model: FakeModel | None = None, *, max_body_bytes: int = 10_000, token: str | None = None) -> Client:
    bearer = None if token is None else f"Bearer {token}".encode()
    return Client(OpenInferenceApp("m", SIGNATURE, model or FakeModel(), max_body_bytes=max_body_bytes, bearer=bearer))


def x(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6.5], **changes}


def mask(**changes: Any) -> dict[str, Any]:
    return {"name": "mask", "shape": [2], "datatype": "BOOL", "data": [True, False], **changes}


def request(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs or (x(), mask())), **more}


def refused(reply: Reply, status: int, *words: str) -> None:
    assert reply.status == status
    assert list(reply.body) == ["error"]
    for word in words:
        assert word in reply.body["error"]


def test_an_answer_names_its_version_in_body_and_header() -> None:
    reply = client().infer(request(id="abc"))
    assert reply.status == 200
    assert reply.headers["shoal-model-version"] == "7"
    assert reply.body == {
        "model_name": "m",
        "model_version": "7",
        "id": "abc",
        "outputs": [
            {"name": "y", "shape": [2, 3], "datatype": "FP32", "data": [2.0, 4.0, 6.0, 8.0, 10.0, 13.0]},
            {"name": "n", "shape": [2], "datatype": "INT64", "data": [0, 1]},
        ],
    }


def test_nested_data_is_the_same_as_flat() -> None:
    flat = client().infer(request()).body
    assert client().infer(request(x(data=[[1, 2, 3], [4, 5, 6.5]]), mask())).body == flat
    assert client().infer(request(mask(), x())).body == flat


def test_inputs_arrive_with_their_dtype_and_shape() -> None:
    model = FakeModel()
    client(model).infer(request())
    assert {name: (array.dtype.name, array.shape) for name, array in model.seen[0].items()} == {
        "x": ("float32", (2, 3)),
        "mask": ("bool", (2,)),
    }


def test_only_the_outputs_that_are_asked_for() -> None:
    reply = client().infer(request(outputs=[{"name": "n", "parameters": {"binary_data": False}}]))
    assert [output["name"] for output in reply.body["outputs"]] == ["n"]
    refused(client().infer(request(outputs=[{"name": "z"}])), 422, "'z'", "'y', 'n'")


def test_get_paths() -> None:
    subject = client()
    assert subject.get("/v2").body["name"] == "shoal"
    assert subject.get("/v2/health/live").body == {"live": True}
    assert subject.get("/v2/health/ready").status == 200
    for path in ("/v2/models/m", "/v2/models/m/versions/7"):
        body = subject.get(path).body
        assert (body["versions"], body["inputs"][0]) == (["7"], {"name": "x", "datatype": "FP32", "shape": [-1, 3]})
        assert subject.get(f"{path}/ready").headers["shoal-model-version"] == "7"
    assert subject.infer(request(), "/v2/models/m/versions/7/infer").status == 200


def test_it_can_be_mounted_below_a_prefix() -> None:
    subject = client()
    subject.root_path = "/cartpole"
    assert subject.get("/v2/models/m").status == 200
    assert subject.infer(request()).status == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v2/models", "/v2/models/other", "/v2/models/m/versions", "/v2/models/m/versions/6",
     "/v2/models/m/versions/7/infer/x", "/v2/models/m/explain", "/v2/models/m/ready/x", "/v2/models/other/stats"],
)  # fmt: skip
def test_unknown_paths_models_and_versions_are_404(path: str) -> None:
    refused(client().get(path), 404)


def test_unknown_model_and_version_are_404_for_infer_too() -> None:
    refused(client().infer(request(), "/v2/models/other/infer"), 404, "'other'", "'m'")
    refused(client().infer(request(), "/v2/models/m/versions/6/infer"), 404, "'6'", "7")


def test_a_version_that_changed_meanwhile_is_not_answered_by_another() -> None:
    class Moving(FakeModel):
        async def infer(self, inputs: dict[str, np.ndarray], num_rows: int) -> Answer:
            self.version = 8
            return await super().infer(inputs, num_rows)

    refused(client(Moving()).infer(request(), "/v2/models/m/versions/7/infer"), 404, "from version 7 to 8")


def test_wrong_methods_are_405_and_say_what_is_allowed() -> None:
    for method, path, allowed in [
        ("GET", "/v2/models/m/infer", "POST"),
        ("DELETE", "/v2/models/m/versions/7/infer", "POST"),
        ("POST", "/v2/models/m", "GET"),
        ("POST", "/v2/models/m/ready", "GET"),
        ("PUT", "/v2/health/live", "GET"),
    ]:
        reply = client().request(method, path)
        refused(reply, 405, method)
        assert reply.headers["allow"] == allowed


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"inputs": {}}', b"{}",
        b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32"}]}',
        b'{"inputs": [{"name": "x", "shape": "1", "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": 1, "shape": [1], "datatype": "FP32", "data": []}]}',
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_400(body: bytes) -> None:
    refused(client().infer(body), 400, "not an inference request")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([x(shape=[2, 4]), mask()], ["'x'", "FP32 [-1, 3]", "FP32 [2, 4]"]),
        ([x(shape=[6]), mask()], ["'x'", "[-1, 3]", "[6]"]),
        ([x(shape=[0, 3], data=[]), mask()], ["'x'", "[0, 3]"]),
        ([x(shape=[-2, -3]), mask()], ["'x'", "[-2, -3]"]),
        ([x(datatype="FP64"), mask()], ["'x'", "FP32", "FP64"]),
        ([x(datatype="NOPE"), mask()], ["'x'", "FP32", "NOPE"]),
        ([x(data=[1, 2, 3]), mask()], ["'x'", "6 values", "[3]"]),
        ([x(data=[[1, 2], [3, 4], [5, 6]]), mask()], ["'x'", "[3, 2]"]),
        ([x(data=[[1, 2, 3], [4, 5]]), mask()], ["'x'", "FP32"]),
        ([x(data=["1", 2, 3, 4, 5, 6]), mask()], ["'x'", "FP32"]),
        ([x(data=[None] * 6), mask()], ["'x'", "FP32"]),
        ([x(data=7), mask()], ["'x'", "list"]),
        ([x(data={}), mask()], ["'x'", "list"]),
        ([x(data=[[[[[[[[[[1]]]]]]]]]]), mask()], ["'x'", "list"]),
        ([x(), mask(data=[0, 1])], ["'mask'", "BOOL"]),
        ([x(), mask(shape=[3], data=[True] * 3)], ["'mask'", "2 rows", "3"]),
        ([x()], ["'mask'", "missing", "BOOL [-1]"]),
        ([x(), mask(), {**x(), "name": "z"}], ["'z'", "unknown", "'x', 'mask'"]),
        ([x(), x(), mask()], ["'x'", "twice"]),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_422_and_named(inputs: list[dict[str, Any]], words: list[str]) -> None:
    refused(client().infer(request(*inputs)), 422, *words)


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_every_datatype_survives_the_round_trip(datatype: str) -> None:
    tensor = TensorSignature(name="t", datatype=datatype, shape=[-1])
    codec = TensorCodec(Signature(inputs=[tensor], outputs=[tensor]))
    data = [True, False] if datatype == "BOOL" else [0, 100]
    body = json.dumps({"inputs": [{"name": "t", "shape": [2], "datatype": datatype, "data": data}]}).encode()
    decoded, arrays, num_rows = codec.decode(body)
    assert arrays["t"].dtype == np.dtype(DTYPES[datatype][0])
    assert num_rows == 2
    assert json.loads(codec.encode(decoded, "m", 1, arrays))["outputs"][0]["data"] == data


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", 256), ("UINT8", -1), ("INT32", 2**31), ("INT64", 0.5)])
def test_a_value_beyond_its_datatype_is_422(datatype: str, value: float) -> None:
    tensor = TensorSignature(name="t", datatype=datatype, shape=[-1])
    body = json.dumps({"inputs": [{"name": "t", "shape": [1], "datatype": datatype, "data": [value]}]}).encode()
    with pytest.raises(InferenceError, match="'t'") as caught:
        TensorCodec(Signature(inputs=[tensor], outputs=[tensor])).decode(body)
    assert caught.value.status == 422


def test_a_datatype_that_json_cannot_carry_is_refused_when_the_endpoint_is_made() -> None:
    tensor = TensorSignature(name="t", datatype="BF16", shape=[-1])
    with pytest.raises(ConfigError, match="'t' cannot be served"):
        TensorCodec(Signature(inputs=[tensor], outputs=[tensor]))


def test_a_body_that_claims_too_much_is_refused_before_it_is_read() -> None:
    subject = client(max_body_bytes=100)
    reply = subject.request("POST", "/v2/models/m/infer", [b"x" * 50, b"x" * 51])
    refused(reply, 413, "101", "100")
    assert reply.headers["connection"] == "close"
    assert len(subject.unread) == 2


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large() -> None:
    subject = client(max_body_bytes=100)
    refused(subject.request("POST", "/v2/models/m/infer", [b"x" * 60] * 4, claim_length=False), 413, "100")
    assert len(subject.unread) == 2
    refused(subject.request("POST", "/v2/models/m/infer", [b"x" * 101], claim_length=False), 413)


def test_a_body_in_pieces_is_put_together() -> None:
    body = json.dumps(request()).encode()
    pieces = [body[:10], body[10:11], b"", body[11:]]
    assert client().request("POST", "/v2/models/m/infer", pieces).status == 200


@pytest.mark.parametrize("length", ["-1", "ten", "1_0", ""])
def test_a_content_length_that_is_no_number_is_400(length: str) -> None:
    refused(client().infer(request(), headers={"content-length": length}), 400, "Content-Length")


def test_a_token_is_asked_for_everywhere_but_at_the_health_paths() -> None:
    subject = client(token="right")
    for reply in (
        subject.infer(request()),
        subject.infer(request(), headers={"authorization": "Bearer wrong"}),
        subject.infer(request(), headers={"authorization": "right"}),
        subject.get("/v2"),
        subject.get("/v2/models/m/ready"),
        subject.get("/nothing"),
    ):
        refused(reply, 401, "bearer token")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    assert subject.get("/v2/health/live").status == 200
    assert subject.get("/v2/health/ready").status == 200
    assert subject.infer(request(), headers={"Authorization": "Bearer right"}).status == 200


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    reply = client(FakeModel(error=QueueFull(64, retry_after_s=1.0))).infer(request())
    refused(reply, 429, "64")
    assert int(reply.headers["retry-after"]) >= 1


def test_without_weights_it_is_live_but_not_ready() -> None:
    subject = client(FakeModel(version=0, error=InferenceError(503, "no weights have been loaded yet")))
    for reply in (subject.infer(request()), subject.get("/v2/health/ready"), subject.get("/v2/models/m/ready")):
        refused(reply, 503, "no weights")
        assert int(reply.headers["retry-after"]) >= 1
    assert subject.get("/v2/health/live").status == 200
    assert subject.get("/v2/models/m").body["versions"] == []


def test_closing_is_503_and_a_failing_model_500(caplog: pytest.LogCaptureFixture) -> None:
    refused(client(FakeModel(error=Closed("no"))).infer(request()), 503, "closing")
    refused(client(FakeModel(error=ValueError("odd"))).infer(request()), 500, "ValueError: odd")
    assert "a request failed" in caplog.text


@pytest.mark.parametrize("leaves", [True, False])
def test_the_work_of_a_client_that_has_gone_is_cancelled(leaves: bool) -> None:
    """Others, who wait as long, are not disturbed."""

    class Slow(FakeModel):
        cancelled = False

        async def infer(self, inputs: dict[str, np.ndarray], num_rows: int) -> Answer:
            try:
                await asyncio.wait_for(can_answer.wait(), 5.0)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return await super().infer(inputs, num_rows)

    can_answer = asyncio.Event()
    model, sent = Slow(), []

    async def drive() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        watched = asyncio.Event()

        async def receive() -> Any:
            if messages.empty():
                watched.set()
            return await messages.get()

        async def send(message: Any) -> None:
            sent.append(message)

        messages.put_nowait({"type": "http.request", "body": json.dumps(request()).encode()})
        scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": []}
        call = asyncio.create_task(client(model).app(scope, receive, send))
        await asyncio.wait_for(watched.wait(), 5.0)
        if leaves:
            messages.put_nowait({"type": "http.disconnect"})
        else:
            can_answer.set()
        await asyncio.wait_for(call, 5.0)

    asyncio.run(drive())
    assert model.cancelled == leaves
    assert len(sent) == (0 if leaves else 2)


def test_statistics_count_requests_by_status() -> None:
    subject = client()
    for body in (request(), request(), b"{"):
        subject.infer(body)
    stats = subject.app.stats()
    assert (stats["requests"], stats["statuses"], stats["infer_count"]) == (3, {"200": 2, "400": 1}, 2)
    model = subject.get("/v2/models/m/stats").body["model_stats"][0]
    assert (model["version"], model["inference_count"]) == ("7", 2)
    assert (model["inference_stats"]["success"]["count"], model["inference_stats"]["fail"]["count"]) == (2, 1)


def test_lifespan_is_acknowledged() -> None:
    sent = []

    async def drive() -> None:
        messages = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> Any:
            return {"type": next(messages)}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await client().app({"type": "lifespan"}, receive, send)

    asyncio.run(drive())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
strange_inputs = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "mask"]) | json_values,
        "shape": st.lists(st.integers(-(2**70), 2**70), max_size=3) | json_values,
        "datatype": st.sampled_from(["FP32", "BOOL"]) | json_values,
        "data": json_values,
    },
)


@settings(max_examples=300, deadline=None)
@given(inputs=st.lists(strange_inputs | st.just(x()) | st.just(mask()), max_size=3), more=json_values)
def test_no_input_breaks_the_application(inputs: list[Any], more: Any) -> None:
    """Whatever comes, the answer is a status of the protocol, and never the model's or the application's failure."""
    reply = client().infer({"inputs": inputs, "parameters": more})
    assert reply.status in (200, 400, 422)
