"""Fifty readers of the film site: each reads its page, rates a film of it, and pauses for a second on average.

    python benchmarks/ours/recommender_load.py URL NUM_USERS SECONDS

Says the milliseconds of each page, of each rating (POST and the page after it), the site's own milliseconds for fold-in
and candidates, the versions seen, and failures: no 200, no own rating on the next page.
"""

from __future__ import annotations

import http.client
import random
import re
import sys
import threading
import time
from urllib.parse import urlsplit

from benchmarks.talk import say

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Reader(threading.Thread):
    def __init__(self, address: str, seed: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(address, timeout=30.0)
        self.random, self.end_s = random.Random(seed), end_s
        self.cookies: dict[str, str] = {}
        self.pages_ms, self.ratings_ms, self.own_ms = list[float](), list[float](), list[float]()
        self.versions, self.failures = set[int](), list[str]()

    def ask(self, method: str, path: str, body: str = "") -> tuple[int, str, float]:
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        began_s = time.perf_counter()
        self.connection.request(method, path, body or None, headers | (FORM if body else {}))
        answer = self.connection.getresponse()
        text = answer.read().decode()
        took_ms = 1e3 * (time.perf_counter() - began_s)
        for cookie in answer.headers.get_all("Set-Cookie", []):
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer.status, text, took_ms

    def run(self) -> None:
        rated = ""
        time.sleep(self.random.random())
        while time.monotonic() < self.end_s:
            status, text, took_ms = self.ask("GET", "/")
            self.pages_ms.append(took_ms)
            recommended, _, own = text.partition('id="rated"')
            if status != 200 or (rated and f'data-film="{rated}"' not in own):
                self.failures.append(f"status {status}, film {rated}")
                continue
            self.own_ms.append(float(re.search(r"in\s+([\d.]+) ms", text)[1]))  # type: ignore[index]
            self.versions.add(int(re.search(r'id="version">(\d+)<', text)[1]))  # type: ignore[index]
            rated = self.random.choice(re.findall(r'data-film="(\d+)"', recommended))
            form = f"rating={rated}:{self.random.randint(1, 5)}&csrfmiddlewaretoken={self.cookies['csrftoken']}"
            status, _, took_ms = self.ask("POST", "/rate", form)
            self.ratings_ms.append(took_ms)
            if status != 302:
                self.failures.append(f"status {status} of a rating")
            time.sleep(self.random.expovariate(1.0))


def main() -> None:
    address, num_users, seconds = urlsplit(sys.argv[1]).netloc, int(sys.argv[2]), float(sys.argv[3])
    end_s = time.monotonic() + seconds
    readers = [Reader(address, seed, end_s) for seed in range(num_users)]
    say(ready=True)
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    say(
        pages_ms=[each for reader in readers for each in reader.pages_ms],
        ratings_ms=[each for reader in readers for each in reader.ratings_ms],
        own_ms=[each for reader in readers for each in reader.own_ms],
        versions=sorted(set().union(*(reader.versions for reader in readers))),
        failures=[each for reader in readers for each in reader.failures],
    )


if __name__ == "__main__":
    main()
