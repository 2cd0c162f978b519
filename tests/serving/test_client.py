"""The clients against the protocol's own application over real sockets, without Ray."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from refusals import refused
from registered import tensors
from serving import table_model
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, Counting, served
from shoal.client import AsyncClient, Client
from shoal.client.retry import EndpointRequest, Reply, RetryPolicy
from shoal.errors import Closed, ConfigError, ConnectionLost, InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits
from shoal.registry import TensorSignature
from shoal.serve.controller.admin_api import LOAD_TIMEOUT_S
from shoal.serve.controller.change_request import ChangeRequest

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def host() -> FakeHost:
    every = {name.lower(): (name, [-1, 2]) for name in NUMPY_DTYPES}
    return FakeHost(
        FakeModel("m", tensors(x=[-1, 3]), versions=(6, 7)),
        FakeModel("two", tensors(a=[-1, 2], b=("INT64", [-1]))),
        FakeModel("every", tensors(**every)),
        FakeModel("other"),
        FakeModel("empty", versions=()),
        FakeModel("charges", table_model.SIGNATURE.inputs),
        FakeModel("iris", [TensorSignature(name="x", datatype="FP32", shape=[-1, 2], columns=["length", "width"])]),
        shelf=(FakeModel("shelved"),),
    )


@pytest.fixture(scope="module")
def endpoint(host: FakeHost) -> Iterator[tuple[str, Counting]]:
    with served(host) as found:
        yield found


@pytest.fixture(params=[True, False], ids=["binary", "json"])
def client(request: pytest.FixtureRequest, endpoint: tuple[str, Counting]) -> Iterator[Client]:
    with Client(endpoint[0], token=TOKEN, timeout_s=60.0, binary=request.param) as made:
        yield made


def test_arrays_come_back_with_the_version_that_made_them(client: Client) -> None:
    answer = client.infer("m", {"x": ROWS}, request_id="r-1")
    np.testing.assert_array_equal(answer["x"], ROWS)
    assert (answer["x"].dtype, answer.version, answer.model, answer.request_id) == (np.float32, 7, "m", "r-1")


def test_every_datatype_goes_there_and_back(client: Client) -> None:
    sent: dict[str, np.ndarray] = {}
    for name, dtype in NUMPY_DTYPES.items():
        if name == "BYTES":
            sent["bytes"] = np.array([["a", "ß"]], dtype=object)
        else:
            sent[name.lower()] = np.array([[0, 1]]).astype(np.float32 if name == "BF16" else dtype)
    answer = client.infer("every", sent)
    for name, array in sent.items():
        expected = np.array([[b"a", "ß".encode()]], dtype=object) if name == "bytes" else array
        np.testing.assert_array_equal(answer[name], expected, err_msg=name)
        assert answer[name].dtype == expected.dtype, name


CHARGES = {"age": 72.0, "plan": "basic", "since": 1748649600.0, "active": 1.0, "balance": None}


def test_rows_are_taken_as_they_are_one_many_or_a_frame(client: Client) -> None:
    assert client.predict("charges", table_model.ROW) == CHARGES
    since = pd.to_datetime(["2025-05-31", None, "2025-06-01"])
    frame = pd.DataFrame([table_model.ROW] * 3).assign(since=since, customer=1)  # of a column too many
    found = client.predict("charges", frame, rows_per_request=2)
    assert [row["since"] for row in found] == [1748649600.0, None, 1748736000.0]
    assert found[0] == CHARGES
    arrow = pa.table({"length": pa.array([0.1, 2.5], pa.float32()), "more": ["a", "b"], "width": [1, 2]})
    assert client.predict("iris", arrow, version=7) == [
        {"x": {"length": 0.1, "width": 1.0}},
        {"x": {"length": 2.5, "width": 2.0}},
    ]
    values = {"age": np.int64(72), "active": np.bool_(True), "since": pd.NaT, "balance": Decimal("1.5"), "plan": None}
    assert client.predict("charges", values) == {**CHARGES, "since": None, "balance": 1.5, "plan": ""}


def test_what_does_not_fit_a_row_names_its_column(client: Client) -> None:
    with pytest.raises(InferenceError, match=r"age = 'old'.*is no number") as caught:
        client.predict("charges", {**table_model.ROW, "age": "old"})
    assert (caught.value.status, caught.value.field) == (422, "age")
    assert client.predict("charges", {**table_model.ROW, "customer": 1}) == CHARGES
    with pytest.raises(InferenceError, match="width = None: row 1 is no FP32") as caught:
        client.predict("iris", [{"length": 1, "width": 2}, {"length": 1, "width": None}])
    assert caught.value.field == "width"
    with pytest.raises(InferenceError, match=r"expected FP32 \[-1, 3\]"):
        client.predict("m", {"x": [1, 2]})
    with pytest.raises(ConfigError, match="type complex"):
        client.predict("charges", {**table_model.ROW, "plan": {1j}})


def test_outputs_are_those_of_a_mapping(client: Client) -> None:
    answer = client.infer("two", {"a": [[1, 2]], "b": [3]})
    assert (list(answer), len(answer), "a" in answer, "c" in answer) == (["a", "b"], 2, True, False)
    assert {name: array.tolist() for name, array in dict(answer).items()} == {"a": [[1, 2]], "b": [3]}
    with pytest.raises(KeyError, match="there is no output 'c': two gave 'a', 'b'"):
        answer["c"]


@pytest.mark.parametrize("client", [True], indirect=True)
def test_a_forked_process_has_connections_of_its_own(client: Client) -> None:
    def are_ours(first: int) -> bool:
        return all(client.infer("m", [[number, 0, 0]])["x"][0, 0] == number for number in range(first, first + 60))

    assert are_ours(0)
    child = os.fork()
    if not child:
        os._exit(0 if are_ours(1000) else 1)  # nothing of pytest's may run here
    ours = are_ours(2000)
    assert (ours, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == (True, 0)


def test_lists_and_other_floats_become_what_the_model_takes(client: Client) -> None:
    np.testing.assert_array_equal(client.infer("m", [[1, 2, 3]])["x"], np.array([[1, 2, 3]], np.float32))
    np.testing.assert_array_equal(client.infer("m", {"x": ROWS.astype(np.float64)})["x"], ROWS)
    np.testing.assert_array_equal(client.infer("m", ROWS[:, ::-1])["x"], ROWS[:, ::-1])
    np.testing.assert_array_equal(client.infer("two", {"a": [[1, 2]], "b": np.array([3], np.int8)})["b"], [3])


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("two", {"a": [[1, 2]], "b": [0.5]}, "'b': is float64, the model takes INT64"),
        ("m", {"x": [["a", "b", "c"]]}, "'x': is <U1, the model takes FP32"),
        ("m", {"y": ROWS}, "'y': m has no such input"),
        ("two", [[1, 2]], "two has 2 inputs"),
        ("m", [[1, 2], [3]], "'x': is no array"),
        ("every", {"uint8": [[300, 1]]}, "'uint8': has values that UINT8 cannot hold"),
        ("m", torch.ones(1, 3, requires_grad=True), "'x': is no array: .*requires grad"),
        ("m", torch.ones(1, 3, dtype=torch.bfloat16), "'x': is no array: .*BFloat16"),
    ],
)
def test_what_no_endpoint_could_take_is_not_sent(client: Client, model: str, inputs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        client.infer(model, inputs)  # type: ignore[arg-type]


def test_bf16_bits_are_taken_as_they_are(client: Client, host: FakeHost) -> None:
    model = host.models_by_name["every"]
    model.error = InferenceError(409, "seen")
    try:
        sent = {name.lower(): np.zeros((1, 2), dtype) for name, dtype in NUMPY_DTYPES.items() if name != "BYTES"}
        sent |= {"bf16": bf16_bits(np.array([[1.5, 2.5]], np.float32)), "bytes": np.array([[b"", b""]], object)}
        with pytest.raises(InferenceError, match="seen"):
            client.infer("every", sent)
    finally:
        model.error = None
    np.testing.assert_array_equal(model.calls[-1].inputs["bf16"], sent["bf16"])


@pytest.mark.parametrize(
    ("model", "inputs", "status", "words"),
    [
        ("m", [[1, 2]], 422, "input 'x': expected FP32"),
        ("nobody", [[1, 2, 3]], 404, "'nobody'"),
        ("empty", [[1, 2, 3]], 503, "no weights yet"),
    ],
)
def test_the_endpoints_words_are_the_errors(
    client: Client, model: str, inputs: list[list[int]], status: int, words: str
) -> None:
    with refused(status, words):
        client.infer(model, inputs, deadline_s=0.5)


def test_another_model_that_has_the_name_now_is_asked_for_its_signature(client: Client, host: FakeHost) -> None:
    model = host.models_by_name["m"]
    before, other = model.signature, FakeModel("m", tensors(z=("FP64", [-1, 2]))).signature
    try:
        for inputs in (ROWS, {"x": ROWS}):
            model.signature = before
            client.metadata("m")
            model.signature = other
            with pytest.raises(InferenceError, match="'x' is unknown"):  # by the endpoint: the former was known
                client.infer("m", inputs)
            np.testing.assert_array_equal(client.infer("m", [[1, 2]])["z"], [[1, 2]])
            with pytest.raises(ConfigError, match="x"):
                client.infer("m", {"x": ROWS})
        model.signature = before
        client.metadata("m")
        model.signature = other
        np.testing.assert_array_equal(client.infer("m", {"z": [[1, 2]]})["z"], [[1, 2]])
    finally:
        model.signature = before


def test_what_a_call_says_of_itself_arrives(client: Client, host: FakeHost) -> None:
    model = host.models_by_name["m"]
    answer = client.infer("m", ROWS, version=6, outputs=["x"], sticky="ü:1", track="stable", deadline_s=5.0)
    call = model.calls[-1]
    assert answer.version == 6
    assert (call.version, call.sticky, call.track, call.outputs) == (6, "ü:1", "stable", frozenset({"x"}))
    assert call.deadline_s is not None
    client.infer("m", ROWS, parameters={"action": "sampled", "seed": 7})
    assert (model.calls[-1].action, model.calls[-1].seed) == ("sampled", 7)
    client.infer("m", ROWS)
    assert (model.calls[-1].version, model.calls[-1].deadline_s, model.calls[-1].track) == (None, None, "")


@pytest.mark.parametrize("sticky", [" a", "a\n", "%20"])
def test_a_word_arrives_whatever_is_in_it(client: Client, host: FakeHost, sticky: str) -> None:
    client.infer("m", ROWS, sticky=sticky)
    assert host.models_by_name["m"].calls[-1].sticky == sticky
    with pytest.raises(InferenceError, match="expected stable or candidate"):
        client.infer("m", ROWS, track=sticky)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": float("nan")}, "deadline_s = nan: is not a timeout"),
        ({"deadline_s": float("inf")}, "deadline_s = inf: is not a timeout"),
        ({"deadline_s": "soon"}, "deadline_s = 'soon': is not a timeout"),
        ({"deadline_s": 0.0}, "deadline_s = 0.0: is not a timeout. give seconds, above 0"),
        ({"sticky": 17}, "sticky = 17: is not a str"),
        ({"track": 17}, "track = 17: is not a str"),
        ({"outputs": "x"}, r"outputs = 'x': is a single name. give a list of names, or None for all"),
        ({"outputs": []}, r"outputs = \[\]: asks for nothing. give names, or None for all"),
        ({"model": 17}, "model = 17: is not a str"),
    ],
)
def test_options_that_make_no_sense_are_named(client: Client, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        client.infer(**{"model": "m", "inputs": ROWS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"num_retries": each}, f"num_retries = {each!r}: is not a number of retries") for each in (-1, 1.5, None)),
        *(
            ({"timeout_s": each}, "timeout_s = .*: is not a timeout")
            for each in (0, float("nan"), float("inf"), "soon")
        ),
        *(({"token": each}, "has a blank, a line break or a letter") for each in ("SECRET\n", "SEC RET", "SECRETß")),
        ({"num_connections": 0}, "num_connections = 0: must be at least 1"),
        *(({"url": each}, "is not the address of an endpoint") for each in ("127.0.0.1:8000", "tcp://h:1", "http://")),
    ],
)
def test_a_client_that_cannot_be_is_refused_and_no_token_shown(options: dict[str, Any], message: str) -> None:
    for client_type in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=message) as caught:
            client_type(**{"url": "http://127.0.0.1:1", **options})
        assert "SEC" not in f"{caught.value} {caught.value.value}"


def test_the_repository_and_the_statistics(client: Client) -> None:
    assert ("m", "7", "READY") in [(each.name, each.version, each.state) for each in client.models()]
    client.load("shelved")
    assert client.ready("shelved")
    client.unload("shelved")
    assert not client.ready("shelved")
    client.infer("m", ROWS, version=6)
    assert {each.version for each in client.statistics("m")} == {"6", "7"}
    assert not client.ready("empty")
    assert not client.ready()


def test_one_connection_is_used_for_many_calls(endpoint: tuple[str, Counting]) -> None:
    url, seen = endpoint
    before = len(seen.peers)
    with Client(url, token=TOKEN) as client:
        for _ in range(20):
            client.infer("m", ROWS)
    assert len(seen.peers) == before + 1
    assert seen.paths[-21:].count("/v2/models/m") == 1


def test_many_threads_share_a_client(endpoint: tuple[str, Counting]) -> None:
    with Client(endpoint[0], token=TOKEN) as client:
        wrong: list[int] = []

        def ask(number: int) -> None:
            rows = np.full((1, 3), number, np.float32)
            wrong.extend(number for _ in range(20) if not np.array_equal(client.infer("m", rows)["x"], rows))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", timeout_s=60.0) as client:
        assert not client.live()
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            client.metadata("m")


def _answering(payload: bytes) -> tuple[socket.socket, list[bytes]]:
    """A listener whose every connection gets `payload`, whatever it says, and is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(payload)

    threading.Thread(target=serve, daemon=True).start()
    return listener, heard


@pytest.mark.parametrize(
    "payload", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"], ids=["nothing", "a part of the answer"]
)
def test_a_broken_answer_is_asked_for_again_only_when_told(payload: bytes) -> None:
    listener, heard = _answering(payload)
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            Client(url, timeout_s=60.0) as client,
            pytest.raises(ConnectionLost, match="before the answer was complete"),
        ):
            client.metadata("m")
        assert len(heard) == 1
        with Client(url, timeout_s=60.0, num_retries=2, retry_lost=True) as client, pytest.raises(ConnectionLost):
            client.metadata("m")
        assert len(heard) == 4


@pytest.mark.parametrize(
    ("change", "endpoint_s"),
    [
        (lambda client: client.rollout("promote", "m"), ChangeRequest("promote", "m").timeout_s),
        (lambda client: client.rollout("promote", "m", timeout_s=600), 600.0),
        (lambda client: client.unload("m"), ChangeRequest("delete", "m").timeout_s),
        (lambda client: client.load("m", client="c", self="s"), LOAD_TIMEOUT_S),  # any name is a parameter
    ],
)
@pytest.mark.parametrize("client_type", [Client, AsyncClient])
def test_a_change_is_sent_once_and_waited_for_until_the_endpoint_has_given_it_up(
    monkeypatch: pytest.MonkeyPatch, client_type: type, change: Callable[[Any], Any], endpoint_s: float
) -> None:
    waited_s = []

    async def converse(request: EndpointRequest, policy: RetryPolicy, transport: object) -> Reply:
        assert policy.is_change, "a change that was sent is not sent again"
        waited_s.append(policy.timeout_s)
        return Reply(200, {}, b'{"name": "m"}')

    monkeypatch.setattr("shoal.client.client.request_with_retries", converse)
    asked = change(client_type("http://127.0.0.1:1"))
    if asyncio.iscoroutine(asked):
        asyncio.run(asked)
    assert endpoint_s + 10.0 <= waited_s[0] <= endpoint_s + 60.0


def test_what_is_no_endpoint_is_said_to_be_none() -> None:
    listener, _ = _answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, Client(url) as client, pytest.raises(ConnectionLost, match="no endpoint of this kind"):
        client.metadata("m")


def test_an_endpoint_that_does_not_answer_is_left_in_time_also_by_the_first_call_which_asks_for_the_signature() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def ask() -> None:
            async with AsyncClient(url, timeout_s=1.0) as client:
                await client.infer("m", ROWS, deadline_s=0.2)

        with pytest.raises(InferenceError, match=r"no answer within 0.2 s") as late:
            asyncio.run(ask())
        with Client(url, timeout_s=1.0) as client, pytest.raises(InferenceError, match=r"no answer within 0.2 s"):
            client.infer("m", ROWS, deadline_s=0.2)
        with Client(url, timeout_s=0.2) as client, pytest.raises(InferenceError, match=r"no answer within 0.2 s"):
            client.metadata("m")
    assert late.value.status == 504
    client.close()  # again
    with pytest.raises(Closed):
        client.live()


# -- the asynchronous client against the protocol's own application over real sockets: many calls at once


@pytest.fixture
def held(host: FakeHost) -> Iterator[FakeModel]:
    """The model `m`, which does not answer."""
    model = host.models_by_name["m"]
    model.hold = asyncio.Event()
    yield model
    model.hold = None


async def test_the_asynchronous_client_asks_alike(endpoint: tuple[str, Counting], host: FakeHost) -> None:
    async with AsyncClient(endpoint[0], token=TOKEN) as client:
        answers = await asyncio.gather(*(client.infer("m", ROWS + number) for number in range(20)))
        for number, answer in enumerate(answers):
            np.testing.assert_array_equal(answer["x"], ROWS + number)
        assert await client.live()
        assert not await client.ready()
        assert len(await client.models()) >= 3
        await client.load("shelved")
        await client.unload("shelved")
        with refused(422):
            await client.infer("m", [[1, 2]])
    with pytest.raises(Closed):
        await client.metadata("m")


def test_it_is_for_one_event_loop(endpoint: tuple[str, Counting]) -> None:
    client = AsyncClient(endpoint[0], token=TOKEN)

    async def live() -> bool:
        return await client.live()

    with asyncio.Runner() as runner:
        assert runner.run(live())
        with pytest.raises(Closed, match="belongs to another event loop: make a client in each"):
            asyncio.run(live())
        runner.run(client.close())


def test_a_cancelled_call_leaves_the_endpoint(endpoint: tuple[str, Counting], host: FakeHost) -> None:
    model = host.models_by_name["m"]

    async def ask() -> None:
        async with AsyncClient(endpoint[0], token=TOKEN) as client:
            await client.metadata("m")
            model.hold = asyncio.Event()  # never set
            task = asyncio.ensure_future(client.infer("m", ROWS))
            await _until(lambda: model.waiting == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await _until(lambda: model.waiting == 0)
            with refused(504):
                await client.infer("m", ROWS, deadline_s=0.2)

    try:
        asyncio.run(ask())
    finally:
        model.hold = None


def test_many_first_calls_ask_for_the_signature_once(endpoint: tuple[str, Counting]) -> None:
    async def ask() -> None:
        async with AsyncClient(endpoint[0], token=TOKEN, num_connections=4) as client:
            calls = (client.infer("m", ROWS + number, deadline_s=20.0 if number % 2 else None) for number in range(40))
            for number, answer in enumerate(await asyncio.gather(*calls)):
                np.testing.assert_array_equal(answer["x"], ROWS + number)
            with pytest.raises(InferenceError, match="no model 'nobody'"):
                await asyncio.gather(client.infer("nobody", ROWS), client.infer("nobody", ROWS))

    paths, peers = endpoint[1].paths, endpoint[1].peers
    paths.clear()
    peers.clear()
    asyncio.run(ask())
    assert sorted(set(paths)) == ["/v2/models/m", "/v2/models/m/infer", "/v2/models/nobody"]
    assert [paths.count(path) for path in sorted(set(paths))] == [1, 40, 1]
    assert len(peers) <= 4


async def test_who_waits_for_a_signature_has_a_deadline_of_its_own_and_may_leave(
    endpoint: tuple[str, Counting], held: FakeModel
) -> None:
    async with AsyncClient(endpoint[0], token=TOKEN, num_connections=1) as client:
        await client.metadata("m")
        first = asyncio.ensure_future(client.infer("m", ROWS))
        await _until(lambda: held.waiting == 1)
        leaving = asyncio.ensure_future(client.infer("other", ROWS))
        staying = asyncio.ensure_future(client.infer("other", ROWS))
        with refused(504, r"no answer within 0.05 s"):
            await client.infer("other", ROWS, deadline_s=0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        first.cancel()
        assert (await staying).model == "other"


async def test_waiting_for_a_connection_is_no_waiting_for_an_answer(
    endpoint: tuple[str, Counting], held: FakeModel
) -> None:
    async with AsyncClient(endpoint[0], token=TOKEN, num_connections=1, timeout_s=0.5) as client:
        await client.metadata("other")
        await client.metadata("m")
        late = [asyncio.ensure_future(client.infer("m", ROWS)) for _ in range(2)]
        last = asyncio.ensure_future(client.infer("other", ROWS))
        for call in late:
            with pytest.raises(InferenceError, match=r"no answer within 0.5 s"):
                await call
        assert (await last).model == "other"


async def test_who_waits_for_a_connection_hears_that_the_client_is_closed(
    endpoint: tuple[str, Counting], held: FakeModel
) -> None:
    client = AsyncClient(endpoint[0], token=TOKEN, num_connections=1)
    await client.metadata("m")
    first = asyncio.ensure_future(client.infer("m", ROWS))
    await _until(lambda: held.waiting == 1)
    second = asyncio.ensure_future(client.infer("m", ROWS))
    await asyncio.sleep(0)  # it begins
    await client.close()
    first.cancel()
    _, heard = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(heard, Closed)


async def _until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.01)


async def test_rows_are_taken_as_they_are(endpoint: tuple[str, Counting]) -> None:
    async with AsyncClient(endpoint[0], token=TOKEN) as client:
        [found] = await client.predict("charges", [table_model.ROW])
    assert (found["plan"], found["age"], found["balance"]) == ("basic", 72.0, None)
