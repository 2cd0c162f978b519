"""The console's pages in a browser: values of runs as they are logged, and forms that change what serves."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_console_serving import Host, host, register  # noqa: F401 - the fixture

from answering import answering, run_app
from chromium import Chromium
from serving.served_here import TOKEN
from shoal import runs
from shoal.libs.console.access import Access
from shoal.libs.console.notes import change_note, read_notes
from shoal.libs.console.server import bind, build_app
from shoal.libs.console.serving import try_api
from waiting import wait_for

SCRIPT = "<img src=x onerror='document.title=\"hostile\"'><script>document.title='hostile'</script>"
RUN = "20260101-000000-aaaa"
# The answer of a path is held until `go` is called; `asked`: the page of runs has been drawn, and asks for more.
DELAY = """
window.plain ??= window.fetch;
window.go = null;
window.fetch = async (path, ...more) => {
  if (path.startsWith("/api/runs?")) window.asked = true;
  const answer = await plain(path, ...more);
  return path.split("?")[0] === "%s" && !window.go ? new Promise((go) => { window.go = () => go(answer); }) : answer;
};
"""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a console of this process."""
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with run_app(build_app(Access(TOKEN, port=port)), listening, timeout_graceful_shutdown=1):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture
def recorder() -> Iterator[runs.RunRecorder]:
    with runs.create(SCRIPT, f"name: {json.dumps(SCRIPT)}\n", RUN, command=SCRIPT) as recorder:
        for step in range(1, 6):
            recorder.log(step, {"loss": 1.0 / step, SCRIPT: 1.0, "wait/data": 0.0})
        recorder.record_event(SCRIPT, text=SCRIPT)
        recorder.flush()
        (recorder.folder / "logs").mkdir()
        (recorder.folder / "logs" / "driver.log").write_text(f"{SCRIPT}\n")
        change_note(RUN, {"note": SCRIPT, "tags": [SCRIPT[:40]]})
        yield recorder


def follow_charts(browser: Chromium, recorder: runs.RunRecorder) -> None:
    """The charts of a run's page: their order, what comes by the stream, and a part of one."""

    def wait(script: str) -> Any:
        return wait_for(lambda: browser.run(script), what=script)

    names = "[...document.querySelectorAll('.chart')].map((each) => each.chart.name)"
    wait(f"{names}.length === 3")
    assert browser.run(names) == ["loss", SCRIPT, "wait/data"]  # losses first, waits folded
    folded = "document.querySelector('details')"
    browser.run(f"{folded}.open = true; {folded}.scrollIntoView()")
    wait(f"{folded}.querySelector('.chart').chart.plot?.scales.y.min === -1")  # of zeros, not to 100
    browser.run("scrollTo(0, 0)")
    chart = "[...document.querySelectorAll('.chart')].find((each) => each.chart.name === 'loss').chart"
    wait(f"{chart}?.plot?.data[0].length === 5")
    took = "[...document.querySelectorAll('dt')].find((each) => each.textContent === 'took').nextSibling.textContent"
    before = browser.run(took)
    recorder.log(6, {"loss": 0.1})
    recorder.flush()
    wait(f"{chart}.plot.data[0].length === 6")  # by the stream
    browser.run(DELAY % f"/api/runs/{RUN}/curves")
    browser.run(f"{chart}.zoom([2, 4]); {chart}.onzoom(2, 4)")
    wait("Boolean(window.go)")
    recorder.log(7, {"loss": 0.05})  # while the points of the part are on their way
    recorder.flush()
    wait(f"{chart}.plot.data[0].at(-1) === 7")
    browser.run("window.go()")
    recorder.log(8, {"loss": 0.04})
    recorder.flush()
    wait(f"{chart}.plot.data[0].at(-1) === 8")
    assert browser.run(f"{chart}.plot.data[0].includes(7)")
    assert browser.run(f"[{chart}.plot.scales.x.min, {chart}.plot.scales.x.max]") == [2, 4]
    wait(f"{took} !== {json.dumps(before)}")  # it counts on


def test_pages(tmp_path: Path, address: str, recorder: runs.RunRecorder) -> None:
    with closing(Chromium(tmp_path)) as browser:

        def wait(script: str) -> Any:
            return wait_for(lambda: browser.run(script), what=script)

        def open_page(path: str, script: str) -> None:
            browser.run(f"location.hash = {json.dumps(f'#/{path}')}")
            wait(script)
            shown = browser.run("[document.title, document.querySelectorAll('main script, main img').length]")
            assert shown[0] != "hostile", path
            assert shown[1] == 0, path

        def says(text: str) -> str:
            return f"document.querySelector('main').textContent.includes({json.dumps(text)})"

        browser.show(address)
        wait(f"document.querySelectorAll('tbody a').length === 1 && {says(SCRIPT[:40])}")
        for part, text in (("events", SCRIPT), ("log", SCRIPT), ("spec", "onerror"), ("curves", SCRIPT)):
            open_page(f"run/{RUN}/{part}", f"location.hash.endsWith('{part}') && {says(text)}")

        browser.run(DELAY % f"/api/runs/{RUN}")
        browser.run(f"location.hash = '#/run/{RUN}/spec'")
        wait("Boolean(window.go)")
        open_page("models", says("No model is registered"))
        browser.run("window.go()")
        wait("window.asked")
        assert browser.run(says("No model is registered"))  # the page that one has left does not come back

        for token, script in (
            ("wrong", "document.getElementById('login-problem').textContent"),
            (TOKEN, "!login.open"),
        ):
            browser.run(
                "document.querySelector('#session').click(); document.querySelector('#login input').value = "
                f"{json.dumps(token)}; document.querySelector('#login form').requestSubmit()"
            )
            wait(script)
        assert browser.run("location.hash") == "#/models"
        open_page(f"run/{RUN}/curves", "Boolean(document.querySelector('.note textarea'))")
        write = "each.value = 'mine'; each.dispatchEvent(new Event('change'))"
        browser.run(f"((each) => {{ {write} }})(document.querySelector('.note textarea'))")
        wait_for(lambda: read_notes()[RUN].note == "mine", what="the note")

        follow_charts(browser, recorder)

        page = f"<!doctype html><iframe src='{address}' onload='window.loaded=1'></iframe>"
        with answering(lambda path: page.encode()) as site:  # a page of another site
            browser.show(site.url)
            wait("window.loaded")
        sent = (
            f"fetch('{address}/api/runs').then(() => 'read', () => 'refused').then((word) => {{ window.word = word }})"
        )
        browser.run(sent)
        assert wait("window.word") == "refused"
        frames = browser.call("Page.getFrameTree")["frameTree"]["childFrames"]
        assert [each["frame"].get("unreachableUrl") for each in frames] == [f"{address}/"]


def test_a_row_is_tried_and_a_version_promoted(
    host: Host,  # noqa: F811
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = {"age": 71, "plan": "plus", "since": "31.05.2025", "active": False, "balance": 1024.5}
    monkeypatch.setattr(try_api, "_read_example", lambda metadata: example)
    register(aliases=["champion"], metrics={"<script>document.title='mine'</script>": 1.0})
    with closing(Chromium(tmp_path / "chromium")) as browser:
        body = f"new URLSearchParams({{token: {TOKEN!r}}})"
        browser.call("Page.navigate", url=f"{address}/#/try/shop/table")
        wait_for(lambda: browser.run("document.querySelectorAll('main form input').length") == 4)
        browser.run(f"fetch('/login', {{method: 'POST', body: {body}}}).then(() => {{ window.loggedIn = true; }}); 1")
        wait_for(lambda: browser.run("window.loggedIn"))
        shown = "[...document.querySelectorAll('main form input')].map((each) => each.value)"
        assert browser.run(shown) == ["71", "plus", "31.05.2025", "1024,5"]
        fields = {"age": "72", "plan": "basic", "active": "true"}
        for label, value in fields.items():
            browser.run(
                f"for (const field of document.querySelectorAll('main form [aria-label={label}]'))"
                f" {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input')); }}"
            )
        browser.run("document.querySelector('main form button[type=submit]').click()")
        answer = "document.querySelector('main form [role=status]').textContent"
        wait_for(lambda: "answered by version 7" in (browser.run(answer) or ""))
        (call,) = host.models_by_name["table"].calls
        found = {name: array[0] for name, array in call.inputs.items()}
        sent = {"age": 72.0, "plan": b"basic", "since": 1748649600.0, "active": 1.0, "balance": 1024.5}
        assert found == sent  # what it shows, also of fields that nobody has changed
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
