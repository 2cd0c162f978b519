"""An endpoint for real: Ray, HAProxy, HTTP, and weights that change while it is asked."""

import json
import os
import queue
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

import typed
from endpoint_process import BODY, INFER, NUM_FEATURES, NUM_OUTPUTS, NUM_REGISTERED, Client, EndpointProcess, Load
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.methods import METHODS, SERVICE
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
MAX_BODY_BYTES = 200_000
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    with EndpointProcess(
        num_replicas=2,
        model={"max_batch_size": 4096, "max_queue_size": 8192},
        max_body_bytes=MAX_BODY_BYTES,
        grpc_port=0,
    ) as process:
        yield process


def served_versions(endpoint: EndpointProcess) -> list[int]:
    return [replica["version"] for replica in endpoint.stats()]


def publish_and_wait(endpoint: EndpointProcess, version: int) -> None:
    endpoint.publish(version)
    wait_for(lambda: served_versions(endpoint) == [version] * 2, STATE_TIMEOUT_S)


@pytest.fixture
def version(endpoint: EndpointProcess) -> int:
    """What both replicas answer with: the first version, unless a test before has published others."""
    if not any(served_versions(endpoint)):
        publish_and_wait(endpoint, 1)
    return max(served_versions(endpoint))


def test_before_the_first_weights_it_is_live_and_says_so(endpoint: EndpointProcess) -> None:
    client = Client(endpoint.url)
    assert client.request("GET", "/v2/health/live")[0] == 200
    for status, headers, body in (client.infer(), client.request("GET", "/v2/models/linear/ready")):
        assert (status, headers["retry-after"]) == (503, "1")
        assert "weights" in body["error"]
    assert client.request("GET", "/v2/health/ready")[0] == 200  # by the other model, which answers
    client.close()


def test_errors_keep_the_protocol_through_the_whole_stack(endpoint: EndpointProcess) -> None:
    client = Client(endpoint.url)
    for expected, method, path, body in [
        (400, "POST", INFER, "{"),
        (404, "GET", "/", None),
        (404, "POST", "/v2/models/other/infer", BODY),
        (405, "GET", INFER, None),
        (413, "POST", INFER, "x" * (MAX_BODY_BYTES + 1)),
        (422, "POST", INFER, BODY.replace("FP32", "FP64")),
    ]:
        status, _, content = client.request(method, path, body)
        assert (status, list(content)) == (expected, ["error"])
    client._connection.request("POST", INFER, iter([b"x" * 50_000] * 5))  # too large, and of no length that is named
    assert client._connection.getresponse().status == 413
    client.close()


@pytest.fixture
def channel(endpoint: EndpointProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoint.grpc) as channel:
        yield channel


def tensor_request(num_rows: int = 1, model: str = "linear") -> pb.ModelInferRequest:
    rows = np.full((num_rows, NUM_FEATURES), 0.5, np.float32)
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[rows.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    return request


def infer(channel: grpc.Channel, request: pb.ModelInferRequest) -> grpc.Call:
    """The finished call, whatever became of it; its `result()` is the answer."""
    method = METHODS["ModelInfer"]
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer", method.request.SerializeToString, method.response.FromString)
    future: grpc.Call = call.future(request, timeout=STATE_TIMEOUT_S)
    future.code()  # waits
    return future


def test_published_weights_answer_over_http_and_grpc(
    endpoint: EndpointProcess, channel: grpc.Channel, version: int
) -> None:
    client = Client(endpoint.url)
    status, headers, body = client.infer()
    assert (status, headers["shoal-model-version"], body["model_version"]) == (200, str(version), str(version))
    assert body["outputs"] == [{"name": "y", "shape": [1, NUM_OUTPUTS], "datatype": "FP32", "data": [version] * 2}]
    assert client.request("GET", "/v2/models/linear")[2]["inputs"][0]["shape"] == [-1, NUM_FEATURES]
    assert client.request("GET", "/shoal/v1/status")[2]["grpc"] == endpoint.grpc
    client.close()
    call = infer(channel, tensor_request(3))
    answer = call.result()  # type: ignore[attr-defined]
    assert (answer.model_name, answer.model_version) == ("linear", str(version))
    assert dict(call.trailing_metadata())["shoal-model-version"] == str(version)
    assert answer.raw_output_contents[0] == np.full((3, NUM_OUTPUTS), version, np.float32).tobytes()


def test_a_grpc_stream_is_a_conversation(channel: grpc.Channel, version: int) -> None:
    """Each request leaves when the answer to the one before has come: nothing on the way waits for more."""
    method = METHODS["ModelStreamInfer"]
    make = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer", method.request.SerializeToString, method.response.FromString
    )
    requests: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
    answers = make(iter(requests.get, None), timeout=STATE_TIMEOUT_S)
    for number in range(20):
        requests.put(tensor_request(model="linear" if number % 5 else "other"))
        answer = next(answers)
        assert ("no model 'other'" in answer.error_message) == (number % 5 == 0)
        assert answer.infer_response.model_version == (str(version) if number % 5 else "")
    requests.put(None)
    assert list(answers) == []


@pytest.mark.parametrize("num_swaps", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_swaps_under_load_fail_nothing_and_mix_nothing(endpoint: EndpointProcess, version: int, num_swaps: int) -> None:
    newer = range(version + 1, version + 1 + num_swaps)
    with Load(endpoint.url, num_clients=4) as load:
        for each in newer:
            publish_and_wait(endpoint, each)
            wait_for(lambda each=each: each in load.versions, STATE_TIMEOUT_S, "answer by the newest")
    assert load.hung == 0
    assert list(load.counts) == ["answered"], load.surprises[:3]
    assert set(newer) <= load.versions


def test_a_load_has_the_version_that_answers_and_loses_nothing(endpoint: EndpointProcess, version: int) -> None:
    found = json.loads(typed.said(f"bench {endpoint.url} --model linear --rate 100 --seconds 1 --warm-up 0 --json"))
    assert found["errors"] == {}
    assert {each["of"]: each["count"] for each in found["times"]} == {
        "late when sent": 100, f"version {version}": 100, "all answers": 100
    }  # fmt: skip


def answered(endpoint: EndpointProcess) -> dict[int, int]:
    """Requests that each replica has answered, by its pid."""
    return {replica["pid"]: replica["statuses"].get("200", 0) for replica in endpoint.stats()}


def test_replicas_share_the_work_and_count_it(endpoint: EndpointProcess, version: int) -> None:
    before = answered(endpoint)
    assert len(before) == 2
    with Load(endpoint.url, num_clients=8) as load:  # the ingress may not have seen yet that both are ready
        wait_for(lambda: all(count > before[pid] for pid, count in answered(endpoint).items()), STATE_TIMEOUT_S)
    assert sum(answered(endpoint).values()) - sum(before.values()) == load.counts["answered"]


def champion_and_another(endpoint: EndpointProcess) -> tuple[int, int]:
    """Of the versions of `steps`."""
    champion = int(endpoint.command("champion"))
    return champion, champion % NUM_REGISTERED + 1


def test_a_killed_controller_comes_back_with_what_it_knew_and_a_killed_replica_costs_no_request(
    endpoint: EndpointProcess,
) -> None:
    """What the replica had in hand is asked of the other one."""
    client = Client(endpoint.url)
    victim = min(answered(endpoint))
    _, candidate = champion_and_another(endpoint)
    client.change(action="canary", model="steps", version=candidate, percent=0)
    with Load(endpoint.url, num_clients=4, model="steps") as load:
        before = endpoint.command("controller_pid")
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: controller_pid(endpoint) not in (0, before), STATE_TIMEOUT_S)
        assert client.request("GET", "/shoal/v1/status")[2]["models"][1]["phase"] == "canary"
        client.change(action="promote", model="steps")
        wait_for(lambda: candidate in load.versions, STATE_TIMEOUT_S)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(now := replica_pids(endpoint)) == 2 and victim not in now, STATE_TIMEOUT_S, "another")
    assert load.hung == 0
    assert list(load.counts) == ["answered"], load.surprises[:3]
    assert endpoint.command("champion") == candidate
    client.close()


def replica_pids(endpoint: EndpointProcess) -> set[int]:
    """Of those that answer; none while one of them is being replaced."""
    with suppress(RuntimeError):
        return set(answered(endpoint))
    return set()


def controller_pid(endpoint: EndpointProcess) -> int:
    """0 while it is away."""
    try:
        return int(endpoint.command("controller_pid"))
    except RuntimeError:
        return 0


def test_closed_it_is_gone_and_closing_twice_is_harmless(endpoint: EndpointProcess) -> None:
    """The last test of the module: the others need the endpoint."""
    endpoint.command("close_endpoint")
    port = urlsplit(endpoint.url).port
    assert port is not None

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_for(refused, STATE_TIMEOUT_S)
