"""Start all of it: database, films, a first version, the site, and the retraining. Ctrl-C ends all.

A retraining that ends by itself is started again; meanwhile the site has the last version.

make recommender                       # generated films
make recommender data=my-folder        # ratings.csv and movies.csv, in MovieLens' format
make recommender endpoint=http://127.0.0.1:8000 port=9000
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

MANAGE = Path(__file__).parents[3] / "manage.py"
END_S = 10.0
STEADY_S, MAX_DELAY_S = 60.0, 60.0


class Command(BaseCommand):
    help = __doc__

    def create_parser(self, *words: Any, **options: Any) -> Any:
        return super().create_parser(*words, formatter_class=RawDescriptionHelpFormatter, **options)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--data", default="", help="a folder in MovieLens' format; none: generated films")
        parser.add_argument("--port", type=int, default=8080, help="of the site; 0: a free one (default 8080)")
        parser.add_argument(
            "--every", type=float, default=5.0, help="seconds between two looks for ratings (default 5)"
        )

    def handle(self, *, data: str, port: int, every: float, **_: Any) -> None:
        call_command("migrate", verbosity=0)
        call_command("load", *filter(None, [data]), if_empty=True, stdout=self.stdout)
        call_command("retrain", once=True, stdout=self.stdout)
        connections.close_all()
        order = f"two towers at {settings.RECOMMENDER_ENDPOINT}" if settings.RECOMMENDER_ENDPOINT else "factors alone"
        self.stdout.write(f"data in {settings.RECOMMENDER_HOME}; order: {order}; Ctrl-C ends all")
        self.stdout.flush()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        web, retraining = _start("web", "--port", str(port)), Retraining("--every", str(every))
        try:
            while web.poll() is None:
                if line := retraining.check(time.monotonic()):
                    self.stderr.write(line)
                    self.stderr.flush()
                time.sleep(0.2)
            raise CommandError(f"the site ended by itself, {_describe_end(web.returncode)}")
        except KeyboardInterrupt:
            self.stdout.write("ending")
        finally:
            children = (web, retraining.process)
            for child in children:
                child.terminate()
            for child in children:
                child.wait(END_S)
                child.stdin.close()  # type: ignore[union-attr]


class Retraining:
    """The process that learns, started again after it ended: at once if it worked for a minute, else 1, 2, 4 .. 60 s
    after its end, so that one that always fails does not take the processor from the site."""

    def __init__(self, *words: str) -> None:
        self._words, self._num_failures = words, 0
        self._start(time.monotonic())

    def _start(self, now_s: float) -> None:
        self.process = _start("retrain", *self._words)
        self._started_s, self._due_s = now_s, math.inf

    def check(self, now_s: float) -> str:
        """What there is to say: it has ended; else "". Starts it when that is due."""
        if self._due_s <= now_s:
            self._start(now_s)
        if self._due_s < math.inf or self.process.poll() is None:
            return ""
        self._num_failures = 0 if now_s - self._started_s >= STEADY_S else self._num_failures + 1
        delay_s = find_delay(self._num_failures)
        self._due_s = now_s + delay_s
        self.process.stdin.close()  # type: ignore[union-attr]
        end = _describe_end(self.process.returncode)
        return f"the retraining ended, {end}; the site goes on with the last version; next start in {delay_s:g} s"


def find_delay(num_failures: int) -> float:
    """Seconds before the next start, after so many in a row that did not work for a minute."""
    return min(2.0 ** (num_failures - 1), MAX_DELAY_S) if num_failures else 0.0


def _describe_end(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _start(*words: str) -> subprocess.Popen[bytes]:
    """A command in a process of its own, which ends with this one, and does not get the terminal's Ctrl-C."""
    command = [sys.executable, str(MANAGE), *words, "--with-parent"]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its systems are small
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **threads}, start_new_session=True)
