"""Other ways in which a stock tritonclient asks: with callbacks, together, in streams, and with bodies made by hand.

Run by `triton_program` with each client class.
"""

import asyncio
import threading
from urllib.request import Request, urlopen

from triton_clients import ROWS, STATUSES, TIMEOUT_S, TOKEN, Key, failure, same

# -- other ways to call -----------------------------------------------------------------------------------------------


def check_asynchronous_calls(client):
    x = client.input("x", ROWS)
    if client.kind == "http":
        pending = [client.call("async_infer", "big", [x]) for _ in range(5)]
        for each in pending:
            same(each.get_result(timeout=TIMEOUT_S).as_numpy("x"), ROWS)
        failed = client.call("async_infer", "nobody", [x])
        assert failure(failed.get_result, timeout=TIMEOUT_S).status() == "404"
    elif client.kind == "grpc":
        answers, done = Answers(), 6
        for number in range(5):
            client.call("async_infer", "big", [x], answers.take, request_id=str(number))
        client.call("async_infer", "nobody", [x], answers.take)
        results = answers.wait(done)
        assert sorted(result.get_response().id for result, error in results if error is None) == list("01234")
        assert [error.status() for _, error in results if error is not None] == ["StatusCode.NOT_FOUND"]
        waiting = client.call("async_infer", "hanging", [x], answers.take)
        waiting.cancel()
        assert answers.wait(done + 1)[-1][1].status() == "StatusCode.CANCELLED"
    else:
        x = [x]

        async def together():
            return await asyncio.gather(*(client.client.infer("big", x) for _ in range(20)))

        for result in client.finish(together()):
            same(result.as_numpy("x"), ROWS)


class Answers:
    """What callbacks were given, in order."""

    def __init__(self):
        self._came, self._changed = [], threading.Condition()

    def take(self, result, error):
        with self._changed:
            self._came.append((result, error))
            self._changed.notify_all()

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._came) >= count, TIMEOUT_S), f"{len(self._came)} of {count}"
            return list(self._came)


def check_streams(client):
    """Answers come in the order of the requests, with the errors where they belong, and the stream goes on."""
    x = client.input("x", ROWS)
    models = ["big" if number % 7 else "nobody" for number in range(200)]
    options = {"enable_empty_final_response": True}
    if client.kind == "grpc":
        answers = Answers()
        client.call("start_stream", answers.take)
        for number, model in enumerate(models):
            client.call("async_stream_infer", model, [x], request_id=str(number), **options)
        results = answers.wait(len(models))
        client.call("stop_stream")
    elif client.kind == "grpc_aio":

        async def requests():
            for number, model in enumerate(models):
                yield {"model_name": model, "inputs": [x], "request_id": str(number), **options}

        async def collect():
            return [each async for each in client.client.stream_infer(requests())]

        client.called.add("stream_infer")
        results = client.finish(collect())
    else:
        return
    assert len(results) == len(models)
    for number, (result, error) in enumerate(results):
        if number % 7:
            assert (error, result.get_response().id) == (None, str(number))
            assert result.get_response().parameters["triton_final_response"].bool_param
            same(result.as_numpy("x"), ROWS)
        else:
            assert "no model 'nobody'" in error.message()


def check_a_stream_that_is_cancelled(client):
    x = client.input("x", ROWS)
    if client.kind == "grpc":
        answers = Answers()
        client.call("start_stream", answers.take)
        client.call("async_stream_infer", "hanging", [x])
        client.call("stop_stream", cancel_requests=True)
        assert answers.wait(1)[-1][1].status() == "StatusCode.CANCELLED"
        client.call("start_stream", answers.take, stream_timeout=0.3)
        client.call("async_stream_infer", "hanging", [x])
        error = answers.wait(2)[-1][1]  # the server's word within the stream, or the client's own about its end
        assert error.message() == "the deadline has passed" or error.status() == STATUSES[504]
        client.call("stop_stream")


def check_a_stream_with_a_status(client):
    """`triton_grpc_error` asks for the status of gRPC instead of a message, and for the end of the stream."""
    if client.kind == "grpc":
        answers = Answers()
        client.call("start_stream", answers.take, headers={"triton_grpc_error": "true"})
        client.call("async_stream_infer", "nobody", [client.input("x", ROWS)])
        assert answers.wait(1)[-1][1].status() == STATUSES[404]
        client.call("stop_stream")


def check_a_stream_without_a_key(client):
    if client.kind == "grpc":
        client.call("unregister_plugin")
        answers = Answers()
        client.call("start_stream", answers.take)
        assert answers.wait(1)[-1][1].status() == STATUSES[401]
        client.call("stop_stream")
        client.call("register_plugin", Key(TOKEN))


def check_bodies_made_by_hand(client):
    if client.is_grpc:
        return
    client.called |= {"generate_request_body", "parse_response_body"}
    maker = client.module.InferenceServerClient
    body, header_length = maker.generate_request_body([client.input("x", ROWS)], outputs=[client.output("x")])
    headers = {"authorization": f"Bearer {TOKEN}", "inference-header-content-length": str(header_length)}
    with urlopen(Request(f"{client.http_url}/v2/models/big/infer", body, headers), timeout=TIMEOUT_S) as answer:
        length = answer.headers["inference-header-content-length"]
        result = maker.parse_response_body(answer.read(), header_length=int(length))
    same(result.as_numpy("x"), ROWS)
