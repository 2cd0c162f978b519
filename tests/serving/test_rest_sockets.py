"""The protocol over real sockets: large bodies both ways, bodies that are refused, and connections that live on."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving.fake_host import FakeHost, FakeModel
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from serving.replica_server import LIMITS, exchange
from serving.replica_server import served as replica
from shoal.cluster.ports import find_free_port
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits

INFER = "/v2/models/m/infer"


def converse(limits: RequestLimits, test: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> bytes:
    """What a replica answers, to the end, on a connection on which `test` writes."""

    async def body() -> bytes:
        port = find_free_port()
        async with replica(FakeHost(FakeModel("m")), port, limits=limits):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await test(reader, writer)
            answer = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            return answer

    return asyncio.run(body())


@pytest.mark.parametrize(("sent", "declared"), [(10, 100), (0, 100), (100_000, 200_000)])
def test_a_body_that_ends_early_is_answered_with_400(sent: int, declared: int) -> None:
    """HAProxy 2.8 takes such a client for one that has gone: it closes both connections and answers nothing."""

    async def end_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {declared}\r\n\r\n{'x' * sent}".encode())
        writer.write_eof()

    answer = converse(LIMITS, end_early)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert f'{{"error":"the body ends after {sent} of {declared} bytes"}}'.encode() in answer


PAGE, BEARER = "https://app.example", "authorization: Bearer s3cret"
PREFLIGHT = "access-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type,x-any"
ALLOWED = f"access-control-allow-origin: {PAGE}"


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Of a replica, and of HAProxy before it."""
    port = find_free_port()
    with HaproxyProcess(port, 0, UNCHECKED) as proxy:
        yield port, proxy.port


@pytest.mark.parametrize("through", [0, 1], ids=["replica", "HAProxy"])
@pytest.mark.parametrize(
    ("line", "headers", "status", "there", "missing"),
    [
        ("HEAD /v2", [BEARER], 200, "content-type: application/json", "{"),
        ("HEAD /v2/health/live", [], 200, "content-type: application/json", "{"),
        ("HEAD /openapi.json", [BEARER], 200, "content-type: application/json", "{"),
        ("HEAD /v2", [], 401, "www-authenticate: Bearer", "{"),
        ("POST /v2", [BEARER], 405, "allow: GET, HEAD", "access-control"),
        ("GET /v2", [BEARER, BEARER], 400, "several keys: send one", "access-control"),
        ("GET /v2/health/live", ["X-Api-Key: a", "x-api-key: b"], 400, "several keys", ""),
        ("GET /v2", [BEARER, f"origin: {PAGE}"], 200, ALLOWED, "max-age"),
        ("GET /v2", [f"origin: {PAGE}"], 401, ALLOWED, "max-age"),
        ("GET /none", [BEARER, f"origin: {PAGE}"], 404, ALLOWED, "max-age"),
        ("GET /v2", [BEARER, "origin: https://app.example.org"], 200, "vary: origin", "access-control"),
        ("GET /v2", [BEARER], 200, "vary: origin", "access-control"),
        ("OPTIONS /v2/models/m/infer", [f"origin: {PAGE}", PREFLIGHT], 200, ALLOWED, "{"),
        ("OPTIONS /v1/chat/completions", [f"origin: {PAGE}", PREFLIGHT], 200,
         "access-control-allow-headers: authorization,content-type,x-any", "{"),
        ("OPTIONS /v2", [f"origin: {PAGE}", PREFLIGHT], 200, "access-control-allow-methods: GET, HEAD, POST", "{"),
        ("OPTIONS /v2", ["origin: null", PREFLIGHT], 401, "vary: origin", "access-control"),
        ("OPTIONS /v2", [f"origin: {PAGE}"], 401, ALLOWED, "access-control-allow-methods"),
    ],
)  # fmt: skip
def test_heads_keys_and_pages_of_other_origins(
    line: str, headers: list[str], status: int, there: str, missing: str, through: int, ports: tuple[int, int]
) -> None:
    async def ask() -> str:
        access = AccessControl("s3cret", [])
        async with replica(FakeHost(FakeModel("m")), ports[0], access, origins=[PAGE]):
            return (await exchange(ports[through], f"{line} HTTP/1.1", b"", "\r\n".join(headers))).decode()

    answer = asyncio.run(ask())
    assert int(answer.split()[1]) == status, answer
    assert there in answer
    assert not missing or missing not in answer


async def _ask_all(port: int, origins: list[str]) -> list[str]:
    async with replica(FakeHost(FakeModel("m")), port, origins=origins):
        line = "OPTIONS /v2 HTTP/1.1"
        return [(await exchange(port, line, b"", f"origin: {each}\r\n{PREFLIGHT}")).decode() for each in ("null", PAGE)]


def test_pages_are_allowed_one_by_one_or_all_and_else_none() -> None:
    for origins, counts in ((["*"], [1, 1]), ([PAGE], [0, 1]), ([], [0, 0])):
        answers = asyncio.run(_ask_all(find_free_port(), origins))
        assert [each.count("access-control-allow-origin: ") for each in answers] == counts
