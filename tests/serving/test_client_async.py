"""The asynchronous client against the protocol's own application over real sockets: many calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from registered import tensors
from serving import table_model
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, Counting, served
from shoal.client import AsyncClient
from shoal.errors import Closed, InferenceError

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def host() -> FakeHost:
    return FakeHost(
        FakeModel("m", tensors(x=[-1, 3])),
        FakeModel("other", tensors(x=[-1, 3])),
        FakeModel("empty", versions=()),
        FakeModel("charges", table_model.SIGNATURE.inputs),
        shelf=(FakeModel("shelved"),),
    )


@pytest.fixture(scope="module")
def endpoint(host: FakeHost) -> Iterator[tuple[str, Counting]]:
    with served(host) as found:
        yield found


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
        with pytest.raises(InferenceError) as refused:
            await client.infer("m", [[1, 2]])
        assert refused.value.status == 422
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
            with pytest.raises(InferenceError) as late:
                await client.infer("m", ROWS, deadline_s=0.2)
            assert late.value.status == 504

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
        with pytest.raises(InferenceError, match=r"no answer within 0.05 s") as late:
            await client.infer("other", ROWS, deadline_s=0.05)
        assert late.value.status == 504
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
