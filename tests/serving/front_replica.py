"""A replica's server that follows HAProxy, as a process: `python -m serving.front_replica PORT FOLDER [rest]`.

`rest`: it answers as an endpoint of the model `m`, and of `slow`, which never answers, and adds the header `is-direct`
where HAProxy has not passed the request on. Else `/slow`, and any change, is answered after a minute; `/part` with a
part of an answer, and then no more, and `/stream` with the same in chunks, guarded; `/drip` with a part every half a
second; any other path with the path, and whether HAProxy has passed the request on. SIGTERM stops the server. Says
`alone` once HAProxy accepts no more, and `written` after the part of `/stream`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
import uvicorn.config

from serving.fake_host import FakeHost, FakeModel
from serving.replica_server import LIMITS
from shoal.serve.http import fast_path, front_protocol
from shoal.serve.http.app import RestApp
from shoal.serve.http.front_protocol import FrontFollower
from shoal.serve.http.stream_guard import guard_stream
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_lifecycle import Application, EndpointApp

ANSWER_S = 2.0
LAST = b"4\r\nlast\r\n0\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    if scope["path"] in ("/slow", "/shoal/v1/rollout"):
        await asyncio.sleep(1.0 if scope["query_string"] else 60.0)
    headers = dict(scope["headers"])
    passed_on = b"x-request-disconnect-disabled" in headers
    told = {"path": scope["path"], "is_direct": not passed_on, "from": headers.get(b"shoal-from", b"").decode()}
    body = json.dumps(told).encode()
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [], "guard": guard_stream(LAST)})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        say("written")
        await asyncio.sleep(60.0)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body)),
                                                                  (b"content-type", b"application/json")]}
    )  # fmt: skip
    if scope["path"] == "/part":
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await asyncio.sleep(60.0)
    if scope["path"] == "/drip":
        for at in range(8):
            await send({"type": "http.response.body", "body": body[at : at + 1], "more_body": True})
            await asyncio.sleep(0.5)
        body = body[8:]
    await send({"type": "http.response.body", "body": body})


def build_rest() -> Application:
    slow = FakeModel("slow")
    slow.hold = asyncio.Event()
    host, access = FakeHost(FakeModel("m"), slow), AccessControl(None, [])
    app = EndpointApp(RestApp(host, access, limits=LIMITS), host, access, LIMITS)

    async def answer_marked(scope: Any, receive: Any, send: Any) -> None:
        is_direct = b"x-request-disconnect-disabled" not in dict(scope["headers"])

        async def send_marked(message: Any) -> None:
            if is_direct and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"is-direct", b"1")]
            await send(message)

        await (answer if scope["path"] == "/-/healthz" else app)(scope, receive, send_marked)

    return answer_marked


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main(port: int, folder: Path, application: Application) -> None:
    fast_path.install_application(application)
    server = uvicorn.Server(uvicorn.Config(application, port=port, lifespan="off", log_level="critical"))
    follower = FrontFollower(server, (), port, folder, ANSWER_S)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    following = asyncio.create_task(follower.run())
    while follower._mark is None and not following.done():
        await asyncio.sleep(0.01)
    say("alone")
    await asyncio.gather(serving, following)


if __name__ == "__main__":
    front_protocol.REQUEST_TIMEOUT_S = 1.0
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), build_rest() if sys.argv[3:] else answer))
