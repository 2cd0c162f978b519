"""The film site for tests: a client in this process, and its commands as processes of their own."""

import os
import re
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

SITE = Path(__file__).parents[2] / "serve_apps" / "recommender"
sys.path.append(str(SITE))
MANAGE = str(SITE / "manage.py")


def browse() -> Any:
    """A client that has no session yet, and whose requests need CSRF tokens."""
    from django.test import Client

    return Client(enforce_csrf_checks=True, HTTP_HOST="127.0.0.1")


def rate(client: Any, film: object, stars: object) -> Any:
    token = client.cookies["csrftoken"].value
    return client.post("/rate", {"rating": f"{film}:{stars}", "csrfmiddlewaretoken": token})


def read_page(text: str) -> tuple[list[int], list[int], int]:
    """Recommended films in order, rated films, and the version."""
    recommended, _, rated = text.partition('id="rated"')
    films, own = ([int(each) for each in re.findall(r'data-film="(\d+)"', part)] for part in (recommended, rated))
    return films, own, int(re.search(r'id="version">(\d+)<', text)[1])  # type: ignore[index]


def run_manage(home: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RECOMMENDER_HOME": str(home), "PYTHONWARNINGS": "error"}
    command = [sys.executable, MANAGE, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def find_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://127.0.0.1:"):
            return line.strip()
    raise AssertionError(process.stderr.read() if process.stderr else "")


class Session:
    """A browser without a picture: cookies and forms over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

    def get(self, path: str = "") -> str:
        return self.exchange(path)[1]

    def rate(self, film: int, stars: int) -> str:
        return self.exchange("rate", self.fill_form(film, stars))[1]

    def fill_form(self, film: int, stars: int) -> bytes:
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get())[1]  # type: ignore[index]
        return f"rating={film}:{stars}&csrfmiddlewaretoken={token}".encode()

    def exchange(self, path: str = "", form: bytes | None = None) -> tuple[int, str]:
        """Status and text."""
        try:
            with self.opener.open(self.url + path, form) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def count_rows(home: Path) -> int:
    with closing(sqlite3.connect(home / "ratings.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM films_rating").fetchone()[0])
