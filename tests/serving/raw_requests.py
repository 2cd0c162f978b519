"""Requests as bytes, plain and out of the ordinary, with what each is called: for tests of what answers at a port.

A request without `connection: close` leaves its connection open. `ENDS`: the client then ends its side; HAProxy takes
that for a client that has gone, unless the answer is there before.
"""

import json

INFER, SLOW = "/v2/models/m/infer", "/v2/models/slow/infer"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, 0, 7]}]})
HOST, LENGTH = "host: a", f"content-length: {len(BODY)}"
ENDS = "the client ends its side: "


def ask(line: str, *headers: str, body: str = "") -> bytes:
    return "\r\n".join([line, *headers, "", body]).encode("latin-1")


def get(*headers: str, path: str = "/v2/health/live", version: str = "HTTP/1.1", method: str = "GET") -> bytes:
    return ask(f"{method} {path} {version}", *headers)


def post(*headers: str, body: str = BODY, path: str = INFER, version: str = "HTTP/1.1") -> bytes:
    return ask(f"POST {path} {version}", *headers, body=body)


def chunked(*chunks: str, coding: str = "chunked", end: str = "0\r\n\r\n", path: str = INFER) -> bytes:
    body = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in chunks)
    return post(HOST, f"transfer-encoding: {coding}", body=body + end, path=path)


H2C = ("upgrade: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA", "connection: Upgrade, HTTP2-Settings")
PLAIN = {
    "GET": get(HOST),
    "GET that closes": get(HOST, "connection: close"),
    "GET with a query": get(HOST, path="/v2/health/live?a=b&c"),
    "GET of no path": get(HOST, path="/nowhere"),
    "GET of a path for POST": get(HOST, path=INFER),
    "GET with a body": post(HOST, LENGTH).replace(b"POST", b"GET", 1),
    "host with a port": get("Host: a.example:80"),
    "host of IPv6": get("HOST:[::1]:80"),
    "POST": post(HOST, LENGTH),
    "POST that keeps alive": post(HOST, LENGTH, "Connection: keep-alive"),
    "POST of no JSON": post(HOST, "content-length: 3", body="{,}"),
    "POST of another tensor": post(HOST, "content-length: 13", body='{"inputs":[]}'),
    "POST of no model": post(HOST, LENGTH, path="/v2/models/none/infer"),
    "POST without a body": post(HOST, body=""),
    "POST of 40 kB": post(HOST, "content-length: 40000", body=BODY.ljust(40_000)),
    "POST of 2 MB": post(HOST, "content-length: 2000000", body=" " * 2_000_000),
    "long path": get(HOST, path=f"/{'a' * 1025}"),
    "two plain ones": post(HOST, LENGTH) + get(HOST, "connection: close"),
}
ODD = {
    "h2c": get(HOST, *H2C),
    "POST with h2c": post(HOST, LENGTH, *H2C),
    "POST with h2c that keeps alive": post(HOST, LENGTH, "connection: keep-alive, Upgrade", "upgrade: h2c"),
    "WebSocket": get(HOST, "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    "connection without upgrade": post(HOST, LENGTH, "connection: upgrade"),
    "connection names a header": get(HOST, "connection: close, x", "x: y"),
    "two hosts": get(HOST, "host: b"),
    "no host": get(),
    "empty host": get("host:"),
    "host with a path": get("host: a/b"),
    "host and target differ": get("host: b", path="http://a/v2/health/live"),
    "absolute target": get(HOST, path="http://a/v2/health/live"),
    "target without a slash": get(HOST, path="v2/health/live"),
    "target with a fragment": get(HOST, path="/v2/health/live#a"),
    "target with a quote": get(HOST, path='/v2/"health'),
    "target with a space": get(HOST, path="/v2/health/live a"),
    "encoded target": get(HOST, path="/v2/health%2Flive"),
    "path of Serve": get(HOST, path="/-/healthz"),
    "path of Serve, encoded": get(HOST, path="/%2D/routes"),
    "asterisk": get(HOST, path="*", method="OPTIONS"),
    "CONNECT": get(HOST, path="a:80", method="CONNECT"),
    "HEAD": get(HOST, method="HEAD"),
    "PUT": post(HOST, LENGTH).replace(b"POST", b"PUT", 1),
    "method of nobody": get(HOST, method="BREW"),
    "method in small letters": get(HOST, method="get"),
    "HTTP/1.0": get(HOST, version="HTTP/1.0"),
    "HTTP/1.0 that keeps alive": post(HOST, LENGTH, "connection: keep-alive", version="HTTP/1.0"),
    "HTTP/0.9": b"GET /v2/health/live\r\n\r\n",
    "HTTP/1.2": get(HOST, version="HTTP/1.2"),
    "HTTP/2.0 in a line": get(HOST, version="HTTP/2.0"),
    "chunks": chunked(BODY[:5], BODY[5:]),
    "chunks with a trailer": chunked(BODY, end="0\r\nshoal-from: forged\r\n\r\n"),
    "chunks of no number": post(HOST, "transfer-encoding: chunked", body=f"xyz\r\n{BODY}\r\n0\r\n\r\n"),
    "chunk longer than it says": post(HOST, "transfer-encoding: chunked", body=f"2\r\n{BODY}\r\n0\r\n\r\n"),
    "gzip, chunked": chunked(BODY, coding="gzip, chunked"),
    "xchunked": chunked(BODY, coding="xchunked"),
    "Chunked": chunked(BODY, coding="Chunked"),
    "chunks and a length": post(HOST, LENGTH, "transfer-encoding: chunked", body="0\r\n\r\n"),
    "two lengths": post(HOST, LENGTH, "content-length: 1"),
    "two lengths alike": post(HOST, LENGTH, LENGTH),
    "list of lengths": post(HOST, f"content-length: {len(BODY)}, {len(BODY)}"),
    "length of no number": post(HOST, "content-length: many"),
    "length beyond 64 bits": post(HOST, "content-length: 99999999999999999999"),
    "length over the limit": post(HOST, "content-length: 4000000"),
    "expect": post(HOST, LENGTH, "expect: 100-continue"),
    "folded header": get(HOST, "x: a", " b"),
    "space before the colon of the length": post(HOST, f"content-length : {len(BODY)}"),
    "header without a colon": get(HOST, "x"),
    "value of Latin": get(HOST, "x: \xe9"),
    "value with a control": get(HOST, "x: a\x01b"),
    "lone carriage return": get(HOST, "x: a\rb: c"),
    "lone line feeds": get(HOST).replace(b"\r\n", b"\n"),
    "line before the request": b"\r\n" + get(HOST),
    "sixty-three headers": get(HOST, *(f"x-{at}: y" for at in range(62))),
    "9 kB of headers": get(HOST, f"x: {'y' * 9_000}"),
    "40 kB of headers": get(HOST, f"x: {'y' * 40_000}"),
    "headers that steer Serve": get(HOST, "x-request-id: {}", "serve_multiplexed_model_id: m", "forwarded: for=b"),
    "address of its own": get(HOST, "shoal-from: forged"),
    "change": post(HOST, "content-length: 2", body="{}", path="/shoal/v1/rollout"),
    "nonsense": b"nonsense\r\n\r\n",
    "a line, and no more": b"nonsense\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "half of a head": get(HOST)[:-2],
    "half of a body": post(HOST, LENGTH, body=BODY[:9]),
    "a plain one, then an odd one": post(HOST, LENGTH) + post(HOST, LENGTH, *H2C),
    "a plain one, then nonsense": get(HOST) + b"nonsense\r\n\r\n",
    "a plain one, then half": get(HOST) + get(HOST)[:9],
    "silence": b"",
    f"{ENDS}POST that takes long": post(HOST, LENGTH, path=SLOW),
    f"{ENDS}half of a head": get(HOST)[:-2],
    f"{ENDS}half of a body": post(HOST, LENGTH, body=BODY[:9]),
    f"{ENDS}half of a large body": post(HOST, "content-length: 90000", body=" " * 50_000),
    f"{ENDS}chunks that take long": chunked(BODY, path=SLOW),
    f"{ENDS}nothing": b"",
}
