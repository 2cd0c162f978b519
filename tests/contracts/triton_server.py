"""An endpoint of models without models, over HTTP and gRPC, in a process of its own: for stock clients.

Run as a program: prints its ports as JSON when it can be reached, and ends when its standard input does. Its server
is a replica's; HAProxy stands before it as in an endpoint. Over HTTP it can be reached with and without it.
"""

import asyncio
import json
import sys

import numpy as np

from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from serving.replica_server import served
from shoal.cluster.ports import find_free_port
from shoal.errors import InferenceError
from shoal.open_inference.datatypes import DATATYPES
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions

TOKEN = "the-token"
MAX_BODY_BYTES = 1 << 20


def host() -> FakeHost:
    """A model for each datatype, which gives back what it gets, and one for each thing that can go wrong."""
    every = [FakeModel(f"as_{datatype}", tensors(x=(datatype, [-1, 2]))) for datatype in DATATYPES]
    mixed = FakeModel("mixed", tensors(**{datatype.lower(): (datatype, [-1, 2]) for datatype in DATATYPES}))
    pair = FakeModel(
        "pair",
        tensors(left=[-1, 3], right=("INT64", [-1])),
        tensors(total=[-1, 3], rows=("INT64", [-1]), words=("BYTES", [-1])),
        _added,
        options=ModelOptions(max_batch_size=8),
    )
    failing = {
        "full": InferenceError(429, "the queue is full", retry_after_s=2.0),
        "broken": InferenceError(500, "output 'x' has a NaN"),
        "raising": RuntimeError("a bug"),
        "late": InferenceError(504, "this would come too late"),
    }
    models = [*every, mixed, pair, FakeModel("open", tensors(x=[-1, -1, 2])), FakeModel("big")]
    models.append(FakeModel("aged", versions=(1, 2, 3)))
    for name, error in failing.items():
        model = FakeModel(name)
        model.error = error
        models.append(model)
    hanging = FakeModel("hanging")
    hanging.hold = asyncio.Event()
    return FakeHost(*models, hanging, shelf=(FakeModel("shelved"), FakeModel("empty", versions=())))


def _added(inputs: Arrays) -> dict[str, np.ndarray]:
    left, right = inputs["left"], inputs["right"]
    words = np.array([b"row %d" % number for number in range(len(left))], dtype=object)
    return {"total": left + right[:, None].astype(np.float32), "rows": right, "words": words}


async def main() -> None:
    models = host()
    access = AccessControl(TOKEN, [ApiKey(name="narrow", key="narrow-key", models=["pair"])])  # type: ignore[arg-type]
    limits = RequestLimits(max_body_bytes=MAX_BODY_BYTES)
    http_port = find_free_port()
    async with served(models, http_port, access, limits):
        proxy = await asyncio.to_thread(HaproxyProcess, http_port, find_free_port(), UNCHECKED)
        reached = {"http": http_port, "proxy": proxy.port, "grpc": proxy.grpc_port}
        sys.stdout.write(json.dumps(reached) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        proxy.close()


if __name__ == "__main__":
    asyncio.run(main())
