"""The four stock client classes, called alike; and one value of interest for each datatype.

Used by `triton_checks`, in the clients' own environment.
"""

import asyncio

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient._plugin import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

TOKEN = "the-token"
TIMEOUT_S = 20.0
CLIENTS = {
    "http": tritonclient.http,
    "http_aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc_aio": tritonclient.grpc.aio,
}

# A status of HTTP as gRPC says it, and as the clients print that.
STATUSES = {
    400: "StatusCode.INVALID_ARGUMENT",
    401: "StatusCode.UNAUTHENTICATED",
    403: "StatusCode.PERMISSION_DENIED",
    404: "StatusCode.NOT_FOUND",
    413: "StatusCode.RESOURCE_EXHAUSTED",
    422: "StatusCode.INVALID_ARGUMENT",
    429: "StatusCode.RESOURCE_EXHAUSTED",
    500: "StatusCode.INTERNAL",
    503: "StatusCode.UNAVAILABLE",
    504: "StatusCode.DEADLINE_EXCEEDED",
}

BF16 = ml_dtypes.bfloat16
EDGES = {
    "BOOL": np.array([[True, False], [False, True]]),
    "UINT8": np.array([[0, 255], [1, 2]], np.uint8),
    "UINT16": np.array([[0, 65535], [1, 2]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1], [1, 2]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1], [1, 2**53 + 1]], np.uint64),
    "INT8": np.array([[-128, 127], [1, 2]], np.int8),
    "INT16": np.array([[-32768, 32767], [1, 2]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1], [1, 2]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1], [1, 2**53 + 1]], np.int64),
    "FP16": np.array([[65504.0, -0.5], [6e-8, 0.1]], np.float16),
    "BF16": np.array([[3e38, -0.5], [1e-30, 0.1]], BF16),
    "FP32": np.array([[3.4e38, -0.5], [1e-45, 0.1]], np.float32),
    "FP64": np.array([[1.7e308, -0.5], [5e-324, 0.1]], np.float64),
    "BYTES": np.array([[b"", b"plain"], ["K\u00f6ln".encode(), b"x" * 300]], object),
}


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


class Key(InferenceServerClientPlugin):
    """Adds a key to every request."""

    def __init__(self, key):
        self._key = key

    def __call__(self, request):
        request.headers["authorization"] = f"Bearer {self._key}"


class Client:
    """One stock client. Its methods are called alike, blocking, whether they are coroutines or not; and remembered."""

    def __init__(self, kind, http_port, grpc_port):
        self.kind = kind
        self.is_grpc = kind.startswith("grpc")
        self.is_aio = kind.endswith("aio")
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.module, self.port = CLIENTS[kind], grpc_port if self.is_grpc else http_port
        self.loop = asyncio.new_event_loop()
        self.called = set()
        self.client = self.made()
        self.call("register_plugin", Key(TOKEN))

    def made(self):
        """A client without a key."""

        async def make():  # those of asyncio want a running loop
            return self.module.InferenceServerClient(f"127.0.0.1:{self.port}")

        return self.loop.run_until_complete(make())

    def call(self, method, *args, **options):
        self.called.add(method)
        return self.finish(getattr(self.client, method)(*args, **options))

    def finish(self, result):
        if asyncio.iscoroutine(result):
            return self.loop.run_until_complete(asyncio.wait_for(result, TIMEOUT_S))
        return result

    def refused(self, status, *words, calling="infer", args=(), **options):
        """The call fails with this HTTP status, or gRPC's for it, and with these words."""
        error = failure(self.call, calling, *args, **options)
        wanted = STATUSES[status] if self.is_grpc else str(status)
        assert error.status() == wanted, f"{calling}: expected {wanted}, got {error.status()}: {error.message()}"
        for word in words:
            assert word in error.message(), f"{calling}: expected {word!r} in {error.message()!r}"

    def infer(self, model, *inputs, **options):
        return self.call("infer", model, list(inputs), **options)

    def input(self, name, array, datatype=None, binary=True):
        if datatype is None:
            datatype = next(each for each in EDGES if np.dtype(triton_to_np_dtype(each)) == array.dtype)
        given = self.module.InferInput(name, array.shape, datatype)
        if self.is_grpc:
            given.set_data_from_numpy(array)
        else:
            given.set_data_from_numpy(array, binary_data=binary)
        return given

    def output(self, name, **options):
        return self.module.InferRequestedOutput(name, **options)

    def json(self, method, *args):
        """What an informative call says, as a dict."""
        answer = self.call(method, *args, **({"as_json": True} if self.is_grpc else {}))
        return answer


def failure(function, *args, **options):
    """What the function raises."""
    try:
        function(*args, **options)
    except InferenceServerException as error:
        return error
    raise AssertionError(f"{args[0] if args else function} was not refused")


def same(got, wanted):
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.tobytes() == wanted.tobytes() if wanted.dtype != object else (got == wanted).all(), (got, wanted)
