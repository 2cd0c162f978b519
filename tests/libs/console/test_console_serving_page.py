"""The pages of what serves, in a browser: a form is filled in and sent, a change is asked for once and made."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from test_console_serving import Host, host, register  # noqa: F401 - the fixture

from chromium import Chromium
from serving.served_here import TOKEN
from shoal.libs.console.access import Access
from shoal.libs.console.server import bind, build_app
from waiting import wait_for


@contextmanager
def console() -> Iterator[str]:
    """The address of a console of this process."""
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = build_app(Access(TOKEN, port=port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60.0)
        listening.close()


def test_a_row_is_tried_and_a_version_promoted(host: Host, tmp_path: Path) -> None:  # noqa: F811
    register(aliases=["champion"], metrics={"<script>document.title='mine'</script>": 1.0})
    browser = Chromium(tmp_path / "chromium")
    try:
        with console() as url:
            body = f"new URLSearchParams({{token: {TOKEN!r}}})"
            browser.call("Page.navigate", url=f"{url}/#/try/shop/table")
            wait_for(lambda: browser.run("document.querySelectorAll('main form input').length") == 4)
            browser.run(
                f"fetch('/login', {{method: 'POST', body: {body}}}).then(() => {{ window.loggedIn = true; }}); 1"
            )
            wait_for(lambda: browser.run("window.loggedIn"))
            fields = {"age": "72", "plan": "basic", "since": "2025-05-31", "active": "true"}
            for label, value in fields.items():
                browser.run(
                    f"for (const field of document.querySelectorAll('main form [aria-label={label}]'))"
                    f" {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input')); }}"
                )
            browser.run("document.querySelector('main form button[type=submit]').click()")
            answer = "document.querySelector('main form [role=status]').textContent"
            wait_for(lambda: "answered by version 7" in (browser.run(answer) or ""))
            (call,) = host.models_by_name["table"].calls
            assert [call.inputs[name][0] for name in ("age", "plan", "active")] == [72.0, b"basic", 1.0]
            assert call.inputs["balance"][0] != call.inputs["balance"][0]  # a gap
            wait_for(lambda: "'plan': 'basic'" in browser.run("document.querySelector('pre').textContent"))

            browser.run("location.hash = '#/endpoints/shop/table'; 1")
            wait_for(lambda: browser.run("document.querySelectorAll('#model-table option').length") == 1)
            words = browser.run("document.getElementById('model-table').textContent")
            assert all(each in words for each in ("judged from 50 on", "no more than by chance", "8 candidate"))
            buttons = "[...document.querySelectorAll('#model-table button')]"
            browser.run(f"{buttons}.find((each) => each.textContent === 'Promote').click()")
            asked = "document.querySelector('dialog[open] h2').textContent"
            wait_for(lambda: browser.run(asked) == "Let table@1 answer all requests of table?")
            assert not host.changes
            browser.run("document.querySelector('dialog[open] button').click()")
            wait_for(lambda: len(host.changes) == 1)
            assert host.changes[0]["by"] == "administrator (console)"

            browser.run("location.hash = '#/models/table'; 1")
            wait_for(lambda: browser.run("document.querySelectorAll('svg a').length") == 5)
            opened = browser.run("[...document.querySelectorAll('svg a')].map((each) => each.getAttribute('href'))")
            assert {"#/models/table/1", "#/endpoints/shop", "#/endpoints/shop/table"} <= set(opened)
            assert browser.run("document.title") == "table · Shoal"
    finally:
        browser.close()
