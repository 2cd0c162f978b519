"""A model on uvicorn and starlette, with nothing in between: no batching, the forward where the request is read.

python -m benchmarks.peers.uvicorn_server PORT    # BENCH_WORKLOAD names the model
"""

from __future__ import annotations

import asyncio
import os
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.serving.workloads import WORKLOADS, Forward, answer_of, decode

NAME = os.environ["BENCH_WORKLOAD"]
forward = Forward(NAME)


async def infer(request: Request) -> JSONResponse:
    x = decode(NAME, await request.body())
    y = (await asyncio.to_thread(forward, [x])) if WORKLOADS[NAME].off_processor else forward([x])
    return JSONResponse(answer_of(y[0]))


if __name__ == "__main__":
    app = Starlette(routes=[Route("/infer", infer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
