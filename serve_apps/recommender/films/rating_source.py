"""The log of ratings as a `StreamSource`: the seam through which the retraining learns, as a broker or files are.

A message is one rating: its sensor is the viewer, its values are stars and film, its publisher is the log, and its
sequence is the row id. SQLite commits rows in the order of their ids, so what follows a sequence is all that is new.

Called by the command `retrain`; the web process never imports it.
"""

from __future__ import annotations

import time

from films.models import Rating
from shoal.errors import DataError
from shoal.libs.stream.messages import Message
from shoal.sources import Delivery, StreamState

PUBLISHER = "films_rating"
QUERY_EVERY_S = 0.05  # while a poll waits


class RatingSource:
    """Rows of the log, from the oldest. It is live: a page may add a row at any moment."""

    is_exhausted = False

    def __init__(self) -> None:
        self.num_delivered = 0
        self._last_row: int | None = None  # None: not open

    def example(self) -> Message:
        """The oldest rating. Raises DataError when there is none."""
        if not (messages := _read(0, 1)):
            raise DataError("ratings", PUBLISHER, "has no row yet", "run `manage.py load`, or rate a film")
        return messages[0]

    def open(self, state: StreamState) -> None:
        """Begin after the last row that `state` has learnt."""
        self._last_row = state.sequences.get(PUBLISHER, 0)

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        deadline_s = time.monotonic() + timeout_s
        while self._last_row is not None:
            if messages := _read(self._last_row, max_messages):
                self._last_row = messages[-1].sequence
                self.num_delivered += len(messages)
                return Delivery(messages, received_s=time.time())
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            time.sleep(min(QUERY_EVERY_S, left_s))
        return Delivery()

    def commit(self, state: StreamState) -> None:
        """Nothing to do: the log retains every row, and the version's folder records the last one learnt."""

    def close(self) -> None:
        self._last_row = None


def _read(last_row: int, max_messages: int) -> list[Message]:
    rows = Rating.objects.filter(id__gt=last_row).order_by("id")
    columns = rows.values_list("viewer_id", "stars", "film_id", "timestamp", "id")[:max_messages]
    return [
        Message(str(viewer), (stars, float(film)), float(time_s), PUBLISHER, row)
        for viewer, stars, film, time_s, row in columns
    ]
