"""What a stock tritonclient is told when something is wrong, and the calls that are not served.

Run by `triton_program` with each client class.
"""

import time

import numpy as np
from triton_clients import ROWS, TOKEN, Key, failure, same

# What a stock client has and we do not serve; each of these calls must be refused, and is.
NOT_SERVED = {
    "get_system_shared_memory_status": "tensors travel in the messages",
    "register_system_shared_memory": "tensors travel in the messages",
    "unregister_system_shared_memory": "tensors travel in the messages",
    "get_cuda_shared_memory_status": "tensors travel in the messages",
    "register_cuda_shared_memory": "tensors travel in the messages",
    "unregister_cuda_shared_memory": "tensors travel in the messages",
    "get_trace_settings": "tracing is set in the endpoint's spec",
    "update_trace_settings": "tracing is set in the endpoint's spec",
    "get_log_settings": "logging is set in the endpoint's spec",
    "update_log_settings": "logging is set in the endpoint's spec",
}
ARGUMENTS = {
    "register_system_shared_memory": ("region", "/key", 16),
    "register_cuda_shared_memory": ("region", b"aGFuZGxl", 0, 16),
    "update_trace_settings": (None, {"trace_level": ["OFF"]}),
    "update_log_settings": ({"log_info": True},),
}


# -- what goes wrong --------------------------------------------------------------------------------------------------


def check_wrong_requests(client):
    x, left = client.input("x", ROWS), client.input("left", ROWS)
    right = client.input("right", np.array([1, 2]))
    big = ("big", [x])
    client.refused(404, "no model 'nobody'", args=("nobody", [x]))
    client.refused(422, "input 'left' is unknown", "expected 'x'", args=("big", [left]))
    client.refused(422, "input 'right' is missing", "expected INT64 [-1]", args=("pair", [left]))
    client.refused(422, "input 'left' was given twice", args=("pair", [left, left]))
    client.refused(422, "output 'y' is unknown", "expected 'x'", args=big, outputs=[client.output("y")])
    client.refused(422, "output 'x' was asked for twice", args=big, outputs=[client.output("x"), client.output("x")])
    wrong = client.input("x", ROWS.astype(np.float64))
    client.refused(422, "input 'x': expected FP32 [-1, 3], got FP64 [2, 3]", args=("big", [wrong]))
    client.refused(400, "classification", args=big, outputs=[client.output("x", class_count=2)])
    shared = client.output("x")
    shared.set_shared_memory("region", 24)
    client.refused(400, "shared_memory_region", args=big, outputs=[shared])
    same(client.infer("pair", left, right).as_numpy("rows"), np.array([1, 2]))


def check_failing_models(client):
    given = [client.input("x", ROWS)]
    client.refused(429, "the queue is full", args=("full", given))
    client.refused(500, "output 'x' has a NaN", args=("broken", given))
    client.refused(500, "failed", args=("raising", given))
    client.refused(504, "too late", args=("late", given))
    same(client.infer("big", *given).as_numpy("x"), ROWS)


def check_keys(client):
    given = [client.input("x", ROWS)]
    client.call("unregister_plugin")
    assert client.call("plugin") is None
    client.refused(401, "key", args=("big", given))
    client.refused(401, "key", calling="get_server_metadata")
    assert client.call("is_server_live") is True
    client.call("register_plugin", Key("narrow-key"))
    client.refused(403, "'narrow'", "'big'", args=("big", given))
    client.refused(403, "'narrow'", calling="unload_model", args=("pair",))
    assert client.infer("pair", client.input("left", ROWS), client.input("right", np.array([1, 2])))
    client.call("unregister_plugin")
    client.call("register_plugin", Key(TOKEN))


def check_a_deadline(client):
    if not client.is_grpc:
        return
    started_s = time.monotonic()
    client.refused(504, args=("hanging", [client.input("x", ROWS)]), client_timeout=0.3)
    assert time.monotonic() - started_s < 60


def check_what_is_not_served(client):
    for method in NOT_SERVED:
        error = failure(client.call, method, *ARGUMENTS.get(method, ()))
        wanted = "StatusCode.UNIMPLEMENTED" if client.is_grpc else "404"
        assert error.status() == wanted, (method, error.status(), error.message())
        assert "not served" in error.message() or "no such path" in error.message(), (method, error.message())
