"""A page in headless Chromium plays Catch until it is solved: shown or hidden, with its own policy or the gateway's."""

import runpy
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from catch_game import Catch

from answering import run_server
from chromium import Chromium
from loop.test_javascript_client import CLIENT, SPEC
from rl_setting import TOKEN
from shoal.rl.first_game import describe_given
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import experience_spec
from waiting import wait_for

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium")


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the client's folder: a page there has another port than the gateway, on the same machine."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(CLIENT))) as server,
        run_server(server),
    ):
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with closing(Chromium(tmp_path_factory.mktemp("chromium"))) as found:
        yield found


@pytest.mark.parametrize(("inference", "agents", "is_hidden"), [("local", 1, True), ("remote", 64, False)])
def test_a_page_plays_until_the_game_is_solved(
    tmp_path: Path, site: str, browser: Chromium, inference: str, agents: int, is_hidden: bool
) -> None:
    experience = experience_spec(Catch.observation_space, Catch.action_space, SPEC)
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN, target_return=4.5) as loop:
        address = f"address=ws://127.0.0.1:1&address={loop.websocket_address}"  # the first does not answer
        page = f"{site}/catch/index.html?{address}&inference={inference}&agents={agents}&actor=page#{TOKEN}"
        browser.show(page, is_hidden)
        assert loop.wait_until_solved(timeout_s=600) > 0
        assert browser.run("document.hidden") is is_hidden
        (actor,) = loop.gateway.stats()["actors"]
        assert (actor["actor_id"], actor["invalid"]) == ("page", {})
    wait_for(lambda: browser.run("document.title") == "the run is over", what="the end of the run in the page")
    assert loop.ledger.get_totals().is_balanced


def test_a_page_names_what_the_gateway_rejects(site: str, browser: Chromium, tmp_path: Path) -> None:
    experience = experience_spec(Catch.observation_space, Catch.action_space, SPEC)
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN) as loop:
        browser.show(f"{site}/catch/index.html?address={loop.websocket_address}#guess")
        wait_for(lambda: "bad_token" in (browser.run("document.title") or ""), what="the reason in the page")


def test_the_page_of_the_recipe_learns_beside_its_player_and_shows_the_champion(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("SHOAL_TOKEN", "a-token")
    monkeypatch.setattr("webbrowser.open", opened.append)
    job = runpy.run_path(str(CLIENT.parents[1] / "jobs" / "game.py"))
    spec = job["spec"]().override(["learner.publish_interval_s=0.02"])
    experience, _ = describe_given(spec)
    addresses = [""]
    with job["open_page"](lambda: addresses[-1]) as link:
        assert opened == [link.as_uri()]
        assert link.stat().st_mode & 0o77 == 0
        browser.show(link.as_uri())
        with LocalLoop(spec, experience, tmp_path / "run", "a-token", target_return=0.0) as loop:
            addresses.append(loop.websocket_address)
            wait_for(lambda: bool(browser.run("document.getElementById('episodes')?.textContent > 0")), what="episodes")
            speed = "document.getElementById('speed')"
            browser.run(f"{speed}.value = 4; {speed}.dispatchEvent(new Event('input'))")
            loop.wait_until_solved(timeout_s=600)
        wait_for(lambda: "is over" in browser.run("document.getElementById('news').textContent"), what="the end")
        assert "The champion plays" in browser.run("document.getElementById('player').textContent")
    assert not link.exists()
