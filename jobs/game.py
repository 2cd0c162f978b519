"""A game in the browser that you play while eight copies of it learn in the same page: catch what falls.

    make game                                                         # or: shoal run game

Opens the page, which finds the address and the token; where there is no browser, prints where it is. Catch in other
engines may join too: docs/games/. `python jobs/game.py --help` lists the fields.
"""

import json
import os
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import shoal.runs
from shoal.atomic_file import replace_synced
from shoal.cluster.job_main import RUN_ID, job_main
from shoal.errors import RunError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check
from shoal.home import home, load_access_token
from shoal.runs.record.opening import make_run_id

CLIENT = Path(__file__).resolve().parents[1] / "clients" / "javascript"


def spec() -> ActorLearnerSpec:
    """The recipe: nine of ten drops caught, in the mean of 100 episodes of five."""
    return ActorLearnerSpec.parse(
        {
            "env": {"name": "catch", "observation": {"shape": [4], "low": -1, "high": 1}, "action": 3},
            "algorithm": {"name": "impala", "learning_rate": 0.01, "discount": 0.9},
            "hidden": [16],
            "segment_length": 64,
            "learner": {"batch_steps": 256, "publish_interval_s": 0.1},
            "gateway": {"websocket": 0},
            "target_return": 4.5,
        }
    )


class _PageHandler(SimpleHTTPRequestHandler):
    """The client's folder, and at /address where the run's games join: empty until it is known."""

    def __init__(self, find_address: Callable[[], str], *args: Any) -> None:
        self._find_address = find_address
        super().__init__(*args, directory=str(CLIENT))

    def do_GET(self) -> None:
        if self.path != "/address":
            return super().do_GET()
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(self._find_address().encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the run."""


@contextmanager
def open_page(find_address: Callable[[], str]) -> Iterator[Path]:
    """Serve the page on loopback while the block runs, and open it. Yields a file that leads there."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_PageHandler, find_address)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        page = f"http://127.0.0.1:{server.server_port}/game/"
        link = home() / "game.html"  # private, and not a command line: it has the token
        target = json.dumps(f"{page}#{quote(load_access_token())}").replace("<", "\\u003c")
        replace_synced(link, f"<!doctype html><script>location.replace({target})</script>".encode())
        print(f"play at {page}, which asks for the token, or open {link}", flush=True)
        with suppress(webbrowser.Error):
            webbrowser.open(link.as_uri())
        try:
            yield link
        finally:
            server.shutdown()
            thread.join()
            link.unlink(missing_ok=True)


def run(spec: ActorLearnerSpec, job: str) -> str:
    """The run with its page."""
    from shoal.flows.actor_learner import run_actor_learner  # with Ray, which the page does without

    run_id = spec.resume or os.environ.setdefault(RUN_ID, make_run_id())

    def find_address() -> str:
        with suppress(RunError):  # it has not begun to record yet
            return next((each.address for each in shoal.runs.load(run_id).endpoints() if each.name == "websocket"), "")
        return ""

    with open_page(find_address):
        return run_actor_learner(spec, job)


if __name__ == "__main__":
    job_main(spec(), run, job="game", check=check)
