"""A browser at a console of this process, without a socket."""

from starlette.testclient import TestClient

from serving.served_here import TOKEN
from shoal.libs.console.access import Access
from shoal.libs.console.server import build_app

HOST = "http://localhost:8267"


def open_console(*, logged_in: bool = True) -> TestClient:
    """At one that has just started."""
    client = TestClient(build_app(Access(TOKEN, port=8267)), base_url=HOST, headers={"origin": HOST})
    if logged_in:
        assert client.post("/login", data={"token": TOKEN}, follow_redirects=False).status_code == 303
    return client
