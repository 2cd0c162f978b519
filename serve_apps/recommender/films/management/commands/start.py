"""Start all of it: database, films, a first version, the site, and the retraining. Ctrl-C ends all.

make recommender                       # generated films
make recommender data=my-folder        # ratings.csv and movies.csv, in MovieLens' format
make recommender endpoint=http://127.0.0.1:8000 port=9000
"""

from __future__ import annotations

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
        children = [_start("web", "--port", str(port)), _start("retrain", "--every", str(every))]
        try:
            while all(child.poll() is None for child in children):
                time.sleep(0.2)
            status = next(child.returncode for child in children if child.returncode is not None)
            raise CommandError(f"a process ended by itself, with status {status}")
        except KeyboardInterrupt:
            self.stdout.write("ending")
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(END_S)
                child.stdin.close()  # type: ignore[union-attr]


def _start(*words: str) -> subprocess.Popen[bytes]:
    """A command in a process of its own, which ends with this one, and does not get the terminal's Ctrl-C."""
    command = [sys.executable, str(MANAGE), *words, "--with-parent"]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its systems are small
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **threads}, start_new_session=True)
