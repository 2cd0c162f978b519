"""Serve the site with waitress: `manage.py web`, until it is ended. Prints its address when it answers."""

from __future__ import annotations

import logging
import socket
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.core.wsgi import get_wsgi_application
from django.template.loader import get_template

from films.parent import end_with_parent
from films.recommend import current_version, find_candidates
from shoal.errors import ConfigError, needs_extra

NUM_THREADS = 4  # more would take turns on one interpreter lock, and all be later


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8080, help="0: a free one (default 8080)")
        parser.add_argument("--with-parent", action="store_true", help="end when the standard input is closed")

    def handle(self, *, port: int, with_parent: bool, **_: Any) -> None:
        with needs_extra("recommender"):
            from waitress import create_server

        if with_parent:
            end_with_parent()
        # The first reader does not wait for what is loaded here; without a version the site does not start.
        find_candidates(current_version().get(), {}), get_template("films.html")
        try:
            listener = socket.create_server(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            problem = f"the site cannot listen there: {getattr(error, 'strerror', None) or error}"
            raise ConfigError("port", port, problem, "give another one; 0: any free one") from error
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # else a line for each request that waits
        server = create_server(get_wsgi_application(), sockets=[listener], threads=NUM_THREADS)
        self.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        self.stdout.flush()
        server.run()
