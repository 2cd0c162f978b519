"""The load generator, `shoal bench`'s, in a process of its own; the same for every server, over HTTP/1.1 and gRPC.

    python -m benchmarks.serving.driver PLAN.json

`drive` writes plans and reads the outcome. Where it may, it runs at a higher priority than the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.serving.exchange import STREAM_PATH, Grpc, GrpcStream
from benchmarks.talk import say
from shoal.libs.bench.sender import OK, LoadSender

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What to send, to whom, how; the fields of `LoadSender`, and:

    files: the requests, taken in turn: for HTTP head and body, for gRPC the message
    check: "" or "version": every number of the answer must be the version that the answer names; "models": of the
           second of two requests, 1,000 more
    """

    url: str
    files: list[str]
    out: str
    seconds: float
    connections: int
    rate: float = 0.0
    warm_up_s: float = 0.0
    timeout_s: float = 10.0
    seed: int = 0
    check: str = ""
    grpc_path: str = ""


class Driver(LoadSender):
    """Runs one plan."""

    def __init__(self, plan: Plan) -> None:
        payloads = [Path(file).read_bytes() for file in plan.files]
        times = (plan.seconds, plan.connections, plan.rate, plan.warm_up_s, plan.timeout_s, plan.seed)
        super().__init__(plan.url, payloads, *times)
        self.plan = plan
        self._grpc: dict[asyncio.StreamWriter, Grpc] = {}

    def judge(self, payload: int, kind: str, version: str, body: bytes) -> tuple[str, int]:
        """Look into an answer when the plan asks for it."""
        if self.plan.check and kind == OK:
            answer = msgspec.json.decode(body)
            values = {value for output in answer["outputs"] for value in output["data"]}
            expected = int(version) + 1000 * (payload if self.plan.check == "models" else 0)
            if values != {expected} or answer["model_version"] != version:
                kind = "mixed"
        return super().judge(payload, kind, version, body)

    async def exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, times_s: list[float]
    ) -> tuple[str, str, bytes, bool]:
        if not self.plan.grpc_path:
            return await super().exchange(reader, writer, payload, times_s)
        if (grpc := self._grpc.get(writer)) is None:
            host = self.plan.url.partition("://")[2]
            of_path = GrpcStream if self.plan.grpc_path == STREAM_PATH else Grpc
            grpc = self._grpc[writer] = of_path(host, self.plan.grpc_path)
            writer.write(grpc.opening())
        writer.write(grpc.request(payload))
        while data := await reader.read(READ_BYTES):
            answer, reply = grpc.feed(data)
            if reply:
                writer.write(reply)
            if answer is not None:
                times_s.append(time.monotonic())
                return answer.kind, "0", answer.body, answer.closing
        raise EOFError


def main(path: str) -> None:
    # A client of another machine is not displaced by what it asks. Linux weighs sessions before processes where it has
    # autogroups: there a process's own priority counts only within its session, which is the driver's alone.
    with contextlib.suppress(OSError):
        os.nice(-15)
        Path("/proc/self/autogroup").write_text("-15")
    content: dict[str, Any] = json.loads(Path(path).read_text())
    plan = Plan(**content)
    driver = Driver(plan)
    say(begun_s=time.monotonic())
    rows = driver.run()
    np.savez(
        plan.out, rows=rows, cpu_share=driver.cpu_share, example_kinds=list(driver.examples),
        examples=list(driver.examples.values()),
    )  # fmt: skip
    say(out=plan.out)


if __name__ == "__main__":
    main(sys.argv[1])
