"""Requests that the console must refuse or not obey, as another site, another user or a program sends them."""

from dataclasses import dataclass, field

TOKEN = "the-token-of-this-home"
RUN = "20260101-000000-aaaa"
RELEASE = f"/api/runs/{RUN}/release"
RIGHT = f"token={TOKEN}".encode()


@dataclass(frozen=True)
class HostileRequest:
    """One request. `{host}` and `{port}` stand for the console's own; `{session}` for the cookie of a session.

    statuses: with which it may be answered
    """

    name: str
    method: str = "GET"
    target: str = "/api/runs"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    statuses: tuple[int, ...] = (403,)


def change(name: str, headers: dict[str, str], statuses: tuple[int, ...] = (403,), **fields: object) -> HostileRequest:
    """A change by a browser that would send the session's cookie, though it is SameSite=Strict."""
    asked = {"method": "PATCH", "target": f"/api/runs/{RUN}", "body": b'{"note": "hostile"}', **fields}
    return HostileRequest(name, headers={"cookie": "{session}", **headers}, statuses=statuses, **asked)  # type: ignore[arg-type]


def fetch(site: str, mode: str) -> dict[str, str]:
    return {"sec-fetch-site": site, "sec-fetch-mode": mode}


OWN = {"origin": "http://{host}", "cookie": "{session}"}
REQUESTS = (
    # A name of another site that leads here (DNS rebinding).
    HostileRequest("rebound name", headers={"host": "evil.example"}, statuses=(421,)),
    HostileRequest("rebound name with the port", headers={"host": "evil.example:{port}"}, statuses=(421,)),
    HostileRequest("name that begins like ours", headers={"host": "localhost.evil.example:{port}"}, statuses=(421,)),
    HostileRequest("port that begins like ours", headers={"host": "127.0.0.1:{port}.evil.example"}, statuses=(421,)),
    HostileRequest("another port", headers={"host": "localhost:1"}, statuses=(421,)),
    HostileRequest("empty name", headers={"host": ""}, statuses=(400, 421)),
    HostileRequest("rebound page", target="/", headers={"host": "evil.example:{port}"}, statuses=(421,)),
    # What a page of another site, or of another port of this host, causes.
    HostileRequest("fetch by another site", headers=fetch("cross-site", "no-cors")),
    HostileRequest("fetch by another port", headers=fetch("same-site", "cors")),
    HostileRequest("stream by another site", target=f"/api/stream?runs={RUN}", headers=fetch("cross-site", "cors")),
    HostileRequest("picture of an answer", target=f"/api/runs/{RUN}/log", headers=fetch("cross-site", "no-cors")),
    HostileRequest("script of ours", target="/static/app.js", headers=fetch("cross-site", "no-cors")),
    change("change by another site", {"origin": "http://evil.example", **fetch("cross-site", "cors")}),
    change("change by a file", {"origin": "null"}),
    change("change of no origin", {}),
    change("change by another port", {"origin": "http://127.0.0.1:1", **fetch("same-site", "cors")}),
    change("change by a name in the password", {"origin": "http://{host}@evil.example"}),
    change("change by a user of our name", {"origin": "http://evil@{host}"}),
    change("change by a broken origin", {"origin": "http://[::1"}),
    change("form by another site", {"origin": "http://evil.example", "content-type": "text/plain"}, method="POST"),
    change("removal by another site", {"origin": "http://evil.example"}, method="DELETE", body=b""),
    change("release by another site", {"origin": "http://evil.example"}, target=RELEASE, method="POST"),
    change("end of the session by another site", {"origin": "http://evil.example"}, method="POST", target="/logout"),
    change("question whether a change may be sent", {"origin": "http://evil.example"}, method="OPTIONS", body=b""),
    # Without a session.
    change("change without a session", {**OWN, "cookie": ""}, (401,)),
    change("removal without a session", {**OWN, "cookie": ""}, (401,), method="DELETE", body=b""),
    change("guessed session", {**OWN, "cookie": "shoal-console-{port}=guess"}, (401,)),
    change("broken cookie", {**OWN, "cookie": 'shoal-console-{port}="\\777; \x01='}, (400, 401)),
    change("token in the address", {**OWN, "cookie": ""}, (401,), target=f"/api/runs/{RUN}?token={TOKEN}"),
    change("token as a header", {**OWN, "cookie": "", "authorization": f"Bearer {TOKEN}"}, (401,)),
    HostileRequest("reading that says it is a change", headers={"x-http-method-override": "DELETE"}, statuses=(200,)),
    # The login.
    HostileRequest("wrong token", "POST", "/login", {"origin": "http://{host}"}, b"token=wrong"),
    HostileRequest("token by another site", "POST", "/login", {"origin": "http://evil.example"}, RIGHT),
    HostileRequest("login without an end", "POST", "/login", {"origin": "http://{host}"}, b"token=" + b"a" * 100_000),
    # Paths beyond the record and the page.
    HostileRequest("source of the console", target="/static/../access.py", statuses=(404,)),
    HostileRequest("source, written otherwise", target="/static/%2e%2e/access.py", statuses=(404,)),
    HostileRequest("source, with a backslash", target="/static/..%5c..%5caccess.py", statuses=(404,)),
    HostileRequest("file of the system", target="/static//etc/passwd", statuses=(404,)),
    HostileRequest("run that is a path", target="/api/runs/..%2f..%2ftoken/log", statuses=(404,)),
    HostileRequest("process that is a path", target=f"/api/runs/{RUN}/log?process=../../../token", statuses=(200,)),
    HostileRequest("process with a zero byte", target=f"/api/runs/{RUN}/log?process=driver%00", statuses=(200,)),
    # Values that do not fit.
    HostileRequest("infinite place", target=f"/api/runs/{RUN}/log?after=inf", statuses=(400,)),
    HostileRequest("number that is none", target=f"/api/runs/{RUN}/curves?points=many", statuses=(400,)),
    change("body that is no JSON", OWN, (400,), body=b"{"),
    change("body that is too long", OWN, (400,), body=b'{"note": "' + b"a" * (1 << 20) + b'"}'),
    change("field that no note has", OWN, (400,), body=b'{"status": "finished"}'),
    change("removal by the beginning of a name", OWN, (400,), method="DELETE", target=f"/api/runs/{RUN[:6]}", body=b""),
)  # fmt: skip
