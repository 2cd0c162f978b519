"""A game in the browser that you play while eight copies of it learn in the same page: catch what falls.

    make game                                                         # or: shoal run game
    shoal run game env=ask target_return=20                           # the same for a game of your own, which joins

Opens the page, which has the address and the token; where there is no browser, prints where it is. Further games of any
engine may join: docs/games/. `python jobs/game.py --help` lists the fields.
"""

import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shoal.atomic_file import replace_synced
from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check
from shoal.home import home, load_access_token

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
            "gateway": {"websocket": 8765},
            "target_return": 4.5,
        }
    )


class _PageHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the run."""


@contextmanager
def open_page(websocket: int | None) -> Iterator[None]:
    """Serve the page on loopback while the block runs, and open it."""
    handler = partial(_PageHandler, directory=str(CLIENT))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        page = f"http://127.0.0.1:{server.server_port}/game/?port={websocket}"
        link = home() / "game.html"  # private, and not a command line: it has the token
        target = f"{page}#{load_access_token()}"
        replace_synced(link, f'<!doctype html><script>location.replace("{target}")</script>'.encode())
        print(f"play at {page}, which asks for the token, or open {link}", flush=True)
        with suppress(webbrowser.Error):
            webbrowser.open(link.as_uri())
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            link.unlink(missing_ok=True)


def run(spec: ActorLearnerSpec, job: str) -> str:
    """The run with its page."""
    with open_page(spec.gateway.websocket):
        return run_actor_learner(spec, job)


if __name__ == "__main__":
    job_main(spec(), run, job="game", check=check)
