"""What the site does while another process has the database's write lock: writers wait briefly, readers do not.

SQLite has one writer at a time, and each web thread that waits for it is missing to the readers. A rating of this
process takes milliseconds; a lock that outlasts the first wait is another's, for as long as it likes. From then on
writers try briefly, until one succeeds.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse

FIRST_WAIT_MS, LATER_WAIT_MS = 1000, 50
RETRY_AFTER_S = 5

_is_held_elsewhere = threading.Event()


@contextmanager
def begin_write() -> Iterator[None]:
    """A transaction that has the write lock. Raises OperationalError when another process has it for too long."""
    wait_ms = LATER_WAIT_MS if _is_held_elsewhere.is_set() else FIRST_WAIT_MS
    with connection.cursor() as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {wait_ms}")
    try:
        with transaction.atomic():
            yield
    except OperationalError as error:
        if _is_busy(error):
            _is_held_elsewhere.set()
        raise
    _is_held_elsewhere.clear()


class AnswerBusy:
    """Middleware: a database that is locked is 503 with `Retry-After`, not an error of the site."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Called by Django for what a view raises."""
        if not (isinstance(error, OperationalError) and _is_busy(error)):
            return None
        text = "The ratings are being written by another program. Nothing was stored: try again in some seconds."
        return HttpResponse(text, status=503, content_type="text/plain", headers={"Retry-After": str(RETRY_AFTER_S)})


def _is_busy(error: OperationalError) -> bool:
    code = getattr(error.__cause__, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)  # without the extended part
